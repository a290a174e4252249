"""Where the installed ``kernseal`` command starts: every install has it, only ``kernseal[export]`` has what it needs."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from kernseal.loader.errors import Unsupported


def main() -> None:
    """Run the command, or say which install has what it needs."""
    try:
        from kernseal.export import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kernseal":
            raise
        _refuse(
            f"{error}; the command needs kernseal[export]: from a checkout, pip install '.[export]'. To verify and open"
            " a bundle without it, call kernseal.open(folder) in Python"
        )
    cli.main()


def _refuse(message: str) -> NoReturn:
    code, status = Unsupported.exit_code, Unsupported.status
    if "--json" in sys.argv:
        print(json.dumps({"error": status, "message": message, "exit_code": code}, indent=1))
    else:
        print(f"kernseal: {status}: {message}", file=sys.stderr)
    sys.exit(code)
