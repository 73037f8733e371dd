"""`python -m pod.eval.report RUN_FOLDER… --out FOLDER`: several runs on one page."""

import sys

from pod.eval.report.write import main

sys.exit(main())
