"""Let an environment find, behind its own packages, those of another one.

    $ .venv-torch-2.15.0/bin/python ci/site_behind.py .venv

So one that holds another torch and nothing else runs the tests of a whole one: what both have, the
first gives. Packages installed as editable are found too.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path


def put_behind(own: Path, environment: Path) -> str:
    """Write the file by which an environment's packages follow those in `own`; return a refusal."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    other = environment / "lib" / version / "site-packages"
    if not other.is_dir():
        return f"{environment} has no packages for {version}"
    line = f"import site; site.addsitedir({str(other)!r})\n"
    (own / "zz_behind.pth").write_text(line, encoding="utf-8")
    return ""


def main() -> int:
    """Put an environment's packages behind those of this interpreter, or of a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("environment", type=Path)
    parser.add_argument("--into", type=Path, default=Path(sysconfig.get_path("purelib")))
    flags = parser.parse_args()
    refusal = put_behind(flags.into, flags.environment.resolve())
    if refusal:
        print(f"site_behind: {refusal}", file=sys.stderr)
    return 1 if refusal else 0


if __name__ == "__main__":
    sys.exit(main())
