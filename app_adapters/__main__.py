"""`python3 -m app_adapters ADAPTER`."""

from __future__ import annotations

import sys

from app_adapters.main import main

sys.exit(main())
