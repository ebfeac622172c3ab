"""Where other people's files come from: a folder of the user's, or a clone made at their command.

Nothing of it is part of this repository. Each file is compared with a checksum, so that rows of
different days are of the same instances.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

from public_graphs.graph import OperationGraph
from public_graphs.readers import read_dtr, read_moccasin

SOURCES = {  # folder: where it is cloned from, and its licence
    "moccasin": ("https://github.com/haoming-codes/moccasin", "GPL-3.0"),
    "dtr-prototype": ("https://github.com/uwsampl/dtr-prototype", "none stated"),
}
LOGS = "dtr-prototype/simrd/logs.zip"
_OF_MOCCASIN = {  # names and first halves of SHA-256
    "MobileNet (MLSys)_512_(224, 224, 3)_train_nx": "58fd766d2b36fc4b971e9fcf990f0844",
    "ResNet50 (MLSys)_256_(224, 224, 3)_train_nx": "ad49efb20824a07ece0b11ba9a5449ba",
    "VGG16 (MLSys)_256_(224, 224, 3)_train_nx": "4a62f7b7331e597b4b81fea77df7e1a8",
    "VGG19 (MLSys)_256_(224, 224, 3)_train_nx": "cee494c535b1da611139bf418a1bfb80",
    "fcn_8_vgg (MLSys)_32_(416, 608, 3)_train_nx": "9bbdd4c8615068f80ceae170ba89bc15",
    "segnet (MLSys)_32_(416, 608, 3)_train_nx": "82fdcd648d4371c8a9691ea4fdd9a0e7",
    "vgg_unet (MLSys)_32_(416, 608, 3)_train_nx": "c87900dddeeddc071307862ca7fbd9d6",
    "random_layered_n100_w0.27_nlv0.75_ed0.2_scd0.14": "9d8c75c4962d0bc45bf4fd73a51a8e66",
    "random_layered_n250_w0.43_nlv0.75_ed0.2_scd0.14": "b048fb63c4857481fa53b31775507d21",
    "random_layered_n500_w0.36_nlv0.75_ed0.2_scd0.14": "6a437a2c7eef7ad7d13f2dad9cae0ae8",
    "random_layered_n1000_w0.31_nlv0.75_ed0.2_scd0.14": "adb564e95412b872dfb97db78618d364",
}
CHECKSUMS = {f"moccasin/data/{name}.json": value for name, value in _OF_MOCCASIN.items()}
CHECKSUMS[LOGS] = "63579a07a6e7ce063f5ba49450dfb96a"


class NotThereError(Exception):
    """A file is missing or another one than the rows are of; the message says what to do."""


def clone(folder: Path) -> None:
    """Clone what is not in the folder yet.

    Raises:
        NotThereError: git could not reach the network.
    """
    for name, (address, licence) in SOURCES.items():
        if (folder / name).exists():
            continue
        print(f"cloning {address} (licence: {licence})", flush=True)
        run = subprocess.run(
            ["git", "clone", "-q", "--depth", "1", address, str(folder / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise NotThereError(
                f"{address} could not be cloned ({run.stderr.strip().splitlines()[-1]}). Clone it "
                f"where there is a network, and name the folder that holds the clone: --from DIR"
            )


def read(folder: Path, name: str) -> bytes:
    """Return a file of the list above.

    Raises:
        NotThereError: it is missing, or has other content.
    """
    path = folder / name
    if not path.is_file():
        source = SOURCES[name.partition("/")[0]][0]
        raise NotThereError(f"{path} is missing: it is part of {source}")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()[:32]
    if found != CHECKSUMS[name]:
        raise NotThereError(
            f"{path} has the checksum {found}, and the committed rows are of {CHECKSUMS[name]}"
        )
    return content


def graphs(folder: Path, only: str = "") -> Iterator[tuple[str, OperationGraph]]:
    """Yield every graph with its source: training graphs first, by their number of operations."""
    found: list[tuple[str, OperationGraph]] = []
    for name in CHECKSUMS:
        if name != LOGS:
            graph = read_moccasin(read(folder, name).decode())
            found.append(("Moccasin, random" if not graph.head else "Checkmate", graph))
    with zipfile.ZipFile(io.BytesIO(read(folder, LOGS))) as archive:
        for member in sorted(archive.namelist()):
            if member.endswith(".log"):
                lines = archive.read(member).decode().splitlines()
                title = Path(member).name.partition("-")[0]
                found.append(("DTR", read_dtr(title, lines)))
    order = ("Checkmate", "DTR", "Moccasin, random")
    found.sort(key=lambda item: (order.index(item[0]), len(item[1].operations)))
    for source, graph in found:
        if only.lower() in f"{source} {graph.name}".lower():
            yield source, graph
