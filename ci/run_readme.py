"""Run the code blocks of READMEs and of the documentation: what they show keeps working.

The Python blocks of one file run in order, in one fresh interpreter: later blocks may use the names
of earlier ones. Blocks of commands (`sh`) run between them, in the same folder. A block right under
the line `<!-- no-run: reason -->` is left out. A block of `text` right under one of these is what
it prints; numbers with a unit of time or memory, and percentages, may be others elsewhere. Files
run beside each other, where no times of theirs are put in.

$ python ci/run_readme.py README.md            # fails where a block fails or prints otherwise
$ python ci/run_readme.py --write README.md    # puts in what the blocks print
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(
    r"^```(python|sh)\n(.*?)^```$(?P<shown>\n+```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
COMMANDS = "import subprocess; subprocess.run(['bash', '-euc', {code!r}], check=True)"
LEFT_OUT = re.compile(r"<!-- no-run: .+ -->\n\n?\Z")
END = "\x1e end of block \x1e"
RUN = "exec(compile({code!r}, {path!r}, 'exec')); print({end!r}, flush=True)\n"
NUMBER = r"\d[\d ,.]*(?:e[+-]\d+)?"
MEASURED = re.compile(rf"{NUMBER} ?(ms|us|s|bytes|B|[KMG]i?B|%)(?!\w)|\b\d+\.\d+(?:e[+-]\d+)?\b")
MACHINE = re.compile(r"torch: ?\S+|torch \d\S+|\((x86_64|aarch64|arm64)[^)]*\)")


@dataclass(frozen=True)
class CodeBlock:
    """One block of code, and what the file says that it prints (None: nothing is said)."""

    line: int
    code: str
    output: str | None
    span: tuple[int, int]  # of the output in the file


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield each block that is to be run."""
    for block in BLOCK.finditer(text):
        if not LEFT_OUT.search(text[: block.start()]):
            code = block[2] if block[1] == "python" else COMMANDS.format(code=block[2])
            line = text.count("\n", 0, block.start(2)) + 1
            yield CodeBlock(line, code, block["output"], block.span("output"))


def pattern(output: str) -> list[str]:
    """Return the lines of an output without what a clock or a measurement has put there."""
    text = MEASURED.sub(lambda number: f"# {number[1] or ''}", MACHINE.sub("here", output))
    return [re.sub(r"[\s-]+", " ", line).strip() for line in text.splitlines()]


def printed(path: Path, blocks: list[CodeBlock], at_once: int) -> list[str]:
    """Run the blocks of one file in an empty folder; return what each of them printed.

    Of several files that run at once, each has one thread.

    Raises:
        subprocess.CalledProcessError: one of them has failed.
    """
    # Padding with newlines makes a traceback name the line of the file.
    program = "".join(
        RUN.format(code="\n" * (block.line - 1) + block.code, path=str(path), end=END)
        for block in blocks
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "readme_blocks.py"  # a file: worker processes can import it
        script.write_text(program, encoding="utf-8")
        # Pictures are written, not opened; commands are those of this environment.
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        env = {
            **os.environ,
            "MPLBACKEND": "agg",
            "PATH": programs,
            "ROCKMATE_CACHE": folder,  # what another run has planned would not be planned here
            "PYTHONUNBUFFERED": "1",
            **({"OMP_NUM_THREADS": "1"} if at_once > 1 else {}),
        }
        run = subprocess.run(
            [sys.executable, str(script)], cwd=folder, env=env, stdout=subprocess.PIPE, check=True
        )
    return run.stdout.decode().split(END + "\n")[:-1]


def differences(path: Path, block: CodeBlock, output: str) -> list[str]:
    """Return in lines what a block prints otherwise than the file says; nothing where it agrees."""
    if block.output is None or pattern(block.output) == pattern(output):
        return []
    where = f"{path.name}, the block of line {block.line}"
    return list(
        difflib.unified_diff(
            block.output.splitlines(), output.splitlines(), where, "what it prints", lineterm=""
        )
    )


def with_outputs(text: str, blocks: list[CodeBlock], outputs: list[str]) -> str:
    """Return the text of a file with what its blocks have printed, where it shows that."""
    for block, output in reversed(list(zip(blocks, outputs, strict=True))):
        if block.output is not None:
            start, end = block.span
            lines = (line.rstrip() + "\n" for line in output.splitlines())
            text = text[:start] + "".join(lines) + text[end:]
    return text


def main(arguments: list[str]) -> int:
    """Run each file; stop at the first failure with its traceback."""
    write = arguments[:1] == ["--write"]
    paths = arguments[write:]
    if not paths:
        print("usage: run_readme.py [--write] README.md …", file=sys.stderr)
        return 2
    texts = [Path(name).read_text(encoding="utf-8") for name in paths]
    pages = [list(code_blocks(text)) for text in texts]
    # Times that are put in are those of a machine that does nothing else.
    at_once = 1 if write else os.cpu_count() or 1
    status = 0
    with ThreadPoolExecutor(at_once) as threads:
        runs = [
            threads.submit(printed, Path(name).resolve(), blocks, at_once)
            for name, blocks in zip(paths, pages, strict=True)
        ]
        for name, text, blocks, run in zip(paths, texts, pages, runs, strict=True):
            path = Path(name)
            try:
                outputs = run.result()
            except subprocess.CalledProcessError:
                print(f"readme: {name} failed", file=sys.stderr)
                threads.shutdown(cancel_futures=True)
                return 1
            if write:
                path.write_text(with_outputs(text, blocks, outputs), encoding="utf-8")
            else:
                for block, output in zip(blocks, outputs, strict=True):
                    for line in differences(path, block, output):
                        print(line, file=sys.stderr)
                        status = 1
            shown = sum(block.output is not None for block in blocks)
            print(f"readme: {name}: {len(blocks)} blocks run, {shown} outputs shown", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
