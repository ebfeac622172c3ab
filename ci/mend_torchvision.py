"""Let torchvision be imported beside a build of PyTorch that its wheel was not made for.

torchvision's wheel declares two operators in its compiled library, and nowhere else. Beside a build
of PyTorch for the CPU that library cannot be loaded, and `import torchvision` fails; so do timm,
transformers and Lightning, which import it. `make install` runs this: where the import fails, the
two are declared by torchvision's own `extension.py` in this environment. Nothing else is changed,
and whoever calls one of them gets torchvision's own error.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

MARK = "# Declared here, because the compiled library could not be loaded (ci/mend_torchvision.py)."
DECLARED = f"""

{MARK}
if not _has_ops():
    for _name in ("nms", "qnms"):
        try:
            torch.library.define(
                f"torchvision::{{_name}}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        except RuntimeError:  # it is declared already
            pass
"""


def main() -> int:
    """Mend what is installed, if it is, and if it must be."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return 0
    attempt = [sys.executable, "-c", "import torchvision"]
    if subprocess.run(attempt, capture_output=True, check=False).returncode == 0:
        return 0
    extension = Path(found.origin).with_name("extension.py")
    text = extension.read_text(encoding="utf-8")
    if MARK not in text:
        extension.write_text(text + DECLARED, encoding="utf-8")
    run = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if run.returncode:
        print(
            "torchvision cannot be imported beside this build of PyTorch, and so cannot timm. "
            f"Install the one that pytorch.org names for your build.\n{run.stderr}",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
