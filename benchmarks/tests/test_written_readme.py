"""What rkgb's README says is what its scripts found, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphs import speed
from graphs.breadth import check, line
from graphs.breadth_cases import GROUPS, BreadthCase
from reports import readme

ROOT = Path(__file__).resolve().parents[2]
TEXT = readme.README.read_text(encoding="utf-8")
BREADTH = readme.part(TEXT, "breadth")
# A few of each group, quick ones, and every third of the small modules that each have one trap.
SAMPLE = {
    "features": tuple(case.name for case in GROUPS["features"]()[::3]),
    "text": ("GPT2LMHeadModel", "BertForMaskedLM, padding mask", "MixtralForCausalLM"),
    "vision": ("ViTForImageClassification",),
    "speech": ("Wav2Vec2Model",),
    "encoder-decoder": ("T5ForConditionalGeneration",),
    "torch.nn": ("nn.BatchNorm2d 0", "nn.CTCLoss 0", "nn.LSTM 0", "nn.Transformer 0"),
}
CASES = [
    case
    for group, make in GROUPS.items()
    if group in SAMPLE
    for case in make()
    if case.name in SAMPLE[group]
]


def without_lines(text: str) -> str:
    """Leave line numbers out, but for our own modules: other versions of libraries have others."""
    return re.sub(r"(?<!breadth_modules)\.py:\d+", ".py:N", text)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_the_table_of_breadth_is_what_the_script_finds(case: BreadthCase) -> None:
    if case.group not in ("features", "torch.nn"):
        pytest.importorskip("transformers")
    outcome = check(case)
    if outcome.status == "works":
        assert re.search(rf"^\*\*{case.group}\*\*: .*{re.escape(case.title)}", BREADTH, re.M)
    else:
        assert outcome.status == "refused", outcome.message
        assert without_lines(line(outcome)) in without_lines(BREADTH).splitlines()


def counts() -> dict[str, list[int]]:
    rows = re.findall(r"^\| ([\w.-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", BREADTH, re.M)
    return {group: [int(number) for number in numbers] for group, *numbers in rows}


def test_nothing_is_wrong_and_much_works() -> None:
    found = counts()
    assert set(found) == set(GROUPS)
    assert all(wrong == 0 for _, _, wrong, _ in found.values())
    hugging = ("text", "vision", "speech", "encoder-decoder")
    assert sum(found[group][0] for group in hugging) >= 25
    assert all(found[group][0] > 0 for group in hugging)


def test_every_refusal_says_where_it_is() -> None:
    rows = re.findall(r"^\| (.+?) \| refused \| (to capture .+) \|$", BREADTH, re.M)
    assert rows
    for title, message in rows:
        assert re.search(r"\w+\.py:\d+|\(module '[\w.]+'\)", message), title


def test_the_table_of_speed_is_what_was_measured() -> None:
    rows, stamp = speed.load(speed.RESULTS)
    assert readme.part(TEXT, "speed") == speed.text_of(rows, stamp)
    assert [row.layers for row in rows] == [12, 24, 48, 96]
    assert rows[0].ratio <= 2
    assert rows[-1].ms_per_layer < 1.5 * rows[0].ms_per_layer


def test_results_of_speed_come_back_from_a_file(tmp_path: Path) -> None:
    rows = [speed.Row(12, 1.0, 1.5), speed.Row(24, 2.0, 3.25)]
    speed.save(rows, 3, tmp_path / "speed.csv")
    found, stamp = speed.load(tmp_path / "speed.csv")
    assert found == rows
    assert stamp["repeats"] == "3"
    assert "take 1.50 times as long" in speed.text_of(found, stamp)
    assert "| 24 | 2.00 s | 3.25 s | 1.62 | 135 ms |" in speed.text_of(found, stamp)


def test_parts_are_replaced_between_their_markers() -> None:
    begin, end = readme.markers("x")
    text = f"top\n{begin}old\n{end}bottom\n"
    new = readme.with_part(text, "x", "| new |")
    assert new == f"top\n{begin}\n| new |\n\n{end}bottom\n"
    assert readme.part(new, "x") == "| new |"
    with pytest.raises(ValueError, match="once each"):
        readme.part("no markers", "x")


def test_every_published_name_is_in_the_readme() -> None:
    import rkgb

    section = TEXT.split("## Every published name")[1].split("\n## ")[0]
    assert set(rkgb.__all__) <= set(re.findall(r"`(\w+)`", section))


def test_the_readmes_pictures_are_there_and_small() -> None:
    paths = re.findall(r"!\[.*?\]\((.+?)\)", TEXT)
    assert paths
    for path in paths:
        picture = readme.README.parent / path
        assert 1000 < picture.stat().st_size < 200_000
        assert "/work" not in picture.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_readmes_examples_run() -> None:
    script = ROOT / "ci" / "run_readme.py"
    done = subprocess.run(
        [sys.executable, str(script), str(readme.README)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "5 blocks run" in done.stdout
