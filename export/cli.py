"""The ``kernseal`` command: registers the commands, turns typed errors into exit codes."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, NoReturn

import click

from kernseal.export import (
    commands_build,
    commands_cache,
    commands_gate,
    commands_report,
    commands_share,
    commands_trust,
    run,
)
from kernseal.loader.errors import KernsealError

EXIT_CODES = """\b
Exit codes:
   0  it worked                         6  driver or device
   1  internal error (a bug)            7  input/output
   2  bad argument, unsupported         8  build, patch or rule failed
   3  wrong SM or ABI                   9  source or toolchain is not as pinned
   4  missing, unknown or wrong bytes  10  hashes differ from the committed pins
   5  signature or key                130  interrupted"""


class Commands(click.Group):
    """A group whose commands end in documented exit codes, with one line for people or JSON for programs."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGTERM, _interrupt)
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except KernsealError as error:
            _fail(error.status, str(error), error.exit_code)
        except click.ClickException as error:
            _fail("invalid_argument", error.format_message(), 2)
        except (click.exceptions.Abort, KeyboardInterrupt):
            run.stop_all()
            click.echo("kernseal: interrupted; nothing is half written", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.exit(0)
        except OSError as error:
            _fail("io_error", str(error), 7)
        sys.exit(code if isinstance(code, int) else 0)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _fail(status: str, message: str, code: int) -> NoReturn:
    if "--json" in sys.argv:
        click.echo(json.dumps({"error": status, "message": message, "exit_code": code}, indent=1))
    else:
        click.echo(f"kernseal: {status}: {message}", err=True)
    sys.exit(code)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
)
@click.version_option(package_name="kernseal")
def main() -> None:
    """Sealed GPU kernels: build them from pinned source, verify them, gate them.

    \b
    Examples:
      kernseal build --sm 120
      kernseal verify-bundle dist/sm_120a-linux-x86_64
      kernseal gate --sm 120 --summary gate.md
    """


for _command in (
    commands_build.build,
    commands_trust.verify_source,
    commands_trust.verify_bundle,
    commands_gate.gate,
    commands_build.list_variants,
    commands_build.inspect,
    commands_report.report,
    commands_trust.keygen,
    commands_trust.sign,
    commands_share.wheel,
    commands_share.push,
    commands_share.pull,
    commands_cache.cache,
    commands_trust.doctor,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
