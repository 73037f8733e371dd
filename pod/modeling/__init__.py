"""Models and their caches. Importing any part of it also imports the package's kernels and engine."""

import pod.engine
import pod.kernels  # noqa: F401
