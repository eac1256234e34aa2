"""`ebb-hostagent` and `python -m hostagent`: says so where libvirt's binding is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """See `hostagent.main.main`."""
    from hostagent.main import main as run

    try:
        run()
    except ModuleNotFoundError as error:
        if error.name not in ("libvirt", "psutil"):
            raise
        from ebbtide.extras import installing

        sys.exit(f"ebb-hostagent: this needs the package {error.name}: {installing('host')}")


if __name__ == "__main__":
    main()
