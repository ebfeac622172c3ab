"""Steps recorded on CUDA tensors without content: a build of torch for CUDA, and no GPU needed.

What runs is what CUDA has kernels for; the oracle is torch itself, seen by a mode of our own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "without_driver"
# Torch asks tensors where they are, makes the tangent, and detaches what leaves take over.
NOT_OF_THE_STEP = {"prim.device.default", "aten.detach.default", "aten.empty_like.default"}


def build_answers(folder: Path) -> Path:
    """Compile no_driver.c with the headers that come with torch."""
    packages = Path(torch.__file__).parents[1]
    headers = next(packages.glob("nvidia/*/include/cuda_runtime_api.h"))
    # This header is not among them, and says what is of no importance to a host's compiler.
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").touch()
    nothing = ["host", "device", "device_builtin", "cudart_builtin"]
    nothing += [f"device_builtin_{kind}_type" for kind in ("texture", "surface")]
    defined = [f"-D__{name}__=" for name in nothing] + ["-DCUDARTAPI=", "-DCUDARTAPI_CDECL="]
    defined += [
        f"-D__{name}__(a)=__attribute__((aligned(a)))" for name in ("builtin_align", "align")
    ]
    library = folder / "no_driver.so"
    command = ["c++", "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *defined]
    command += ["-I", str(folder), "-I", str(headers.parent), str(HERE / "no_driver.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["LD_PRELOAD"] = str(build_answers(tmp_path_factory.mktemp("driver")))
    command = [sys.executable, str(HERE / "record_on_cuda.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_runs_on_cuda_tensors_is_recorded_as_it_runs(steps):
    assert len(steps) == 4
    for name, step in steps.items():
        recorded, plain = step["recorded"], step["plain"]
        assert recorded["device"] == "cuda:0", name
        for half in ("forward", "backward"):
            seen = [op for op in plain[half] if op not in NOT_OF_THE_STEP]
            assert recorded[half] == seen, (name, half)
        # Python holds what it has handed to the last operation a little longer than autograd.
        assert recorded["kept_bytes"] >= plain["kept_bytes"] > 0, name


def test_the_kernels_are_those_of_cuda(steps):
    attention = "aten._scaled_dot_product_{}_attention.default"
    assert attention.format("efficient") in steps["encoder layer"]["recorded"]["forward"]
    fused = {attention.format(kind) for kind in ("cudnn", "flash")}
    assert fused & {*steps["autocast"]["recorded"]["forward"]}
    assert "aten.native_dropout.default" in steps["linear"]["recorded"]["forward"]
