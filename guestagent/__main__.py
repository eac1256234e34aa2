"""`python3 -m guestagent`."""

from __future__ import annotations

import sys

from guestagent.main import main

sys.exit(main())
