"""`python -m fq`."""

from __future__ import annotations

import sys

from fq.cli import main

sys.exit(main())
