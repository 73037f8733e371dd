"""Models, and what they hold. Whatever is imported of it, the package's kernels and engine are there."""

import pod.engine
import pod.kernels  # noqa: F401
