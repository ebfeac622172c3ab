"""Run the code blocks of READMEs and of the documentation: what they show keeps working.

The Python blocks of one file run in order, in one fresh interpreter: later blocks may use the names
of earlier ones. Blocks of commands (`sh`) run between them, in the same folder. A block right under
the line `<!-- no-run: reason -->` is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = "import subprocess; subprocess.run(['bash', '-euc', {code!r}], check=True)"
LEFT_OUT = re.compile(r"<!-- no-run: .+ -->\n\n?\Z")


def code_blocks(text: str) -> list[tuple[int, str]]:
    """Return (line number of the first line, Python code) of each block that is to be run."""
    return [
        (
            text.count("\n", 0, block.start(2)) + 1,
            block[2] if block[1] == "python" else COMMANDS.format(code=block[2]),
        )
        for block in BLOCK.finditer(text)
        if not LEFT_OUT.search(text[: block.start()])
    ]


def run_blocks(path: Path) -> int:
    """Run the blocks of one file in an empty folder; return how many there were."""
    blocks = code_blocks(path.read_text(encoding="utf-8"))
    # Padding with newlines makes a traceback name the line of the README.
    program = "".join(
        f"exec(compile({chr(10) * (line - 1) + code!r}, {str(path)!r}, 'exec'))\n"
        for line, code in blocks
    )
    if CONFTEST.exists():  # what a test environment needs before some libraries can be imported
        program = f"import runpy; runpy.run_path({str(CONFTEST)!r})\n{program}"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "readme_blocks.py"  # a file: worker processes can import it
        script.write_text(program, encoding="utf-8")
        # Pictures are written, not opened; commands are those of this environment.
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        env = {**os.environ, "MPLBACKEND": "agg", "PATH": programs}
        subprocess.run([sys.executable, str(script)], cwd=folder, env=env, check=True)
    return len(blocks)


def main(paths: list[str]) -> int:
    """Run each file; stop at the first failure with its traceback."""
    if not paths:
        print("usage: run_readme.py README.md …", file=sys.stderr)
        return 2
    for name in paths:
        path = Path(name).resolve()
        try:
            count = run_blocks(path)
        except subprocess.CalledProcessError:
            print(f"readme: {name} failed", file=sys.stderr)
            return 1
        print(f"readme: {name}: {count} blocks run")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
