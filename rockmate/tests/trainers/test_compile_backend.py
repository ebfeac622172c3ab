"""`torch.compile(model, backend="rockmate")`: bits and peak of `Rockmate`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rockmate
from rkgb.engine import trace_memory
from rockmate import InfeasibleBudgetError, Rockmate, UnsupportedModuleError
from rockmate.integrations import dynamo
from zoo.nets import network

FLOPS = {"cost": "flops", "budget": 0.7}


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiling:
    """The backend, and what it has planned."""

    def __init__(self) -> None:
        self.graphs: list[dynamo.PlannedGraph] = []

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> dynamo.PlannedGraph:
        self.graphs.append(dynamo.rockmate(graph, inputs, **options))
        return self.graphs[-1]

    @property
    def parts(self) -> list[bool | None]:
        """Whether each graph was taken for a part; None where it has not trained."""
        return [one.is_part for one in self.graphs]

    def plans(self) -> list[Any]:
        return [one.graph.plan for one in self.graphs if isinstance(one.graph, Rockmate)]


class Layer(nn.Sequential):
    """One with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Layers(nn.Module):
    """Equal layers, and a break between them, if asked for."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x.square().mean()


def call(model: Any, sample: Any) -> Any:
    args = sample if isinstance(sample, tuple) else (sample,)
    found = model(**sample) if isinstance(sample, dict) else model(*args)
    found = getattr(found, "loss", found)
    return found if found.dim() == 0 else found.square().mean()


def trained(model: Any, of: nn.Module, samples: list[Any]) -> list[Tensor]:
    """Return losses of some steps, and all that has come of them."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(of.parameters(), lr=0.01)
    losses = []
    for sample in samples:
        loss = call(model, sample)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *of.state_dict().values(), torch.rand(1)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def hugging_face(name: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 64}
    words = torch.randint(64, (4, 24))
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, use_cache=False)
        return transformers.LlamaForCausalLM(config), {"input_ids": words, "labels": words}
    config = transformers.BertConfig(**sizes)
    mask = torch.ones_like(words)
    mask[1, 17:] = 0
    sample = {"input_ids": words, "attention_mask": mask, "labels": words}
    return transformers.BertForMaskedLM(config), sample


@pytest.mark.filterwarnings("ignore")  # of dynamo, about Python's own modules
@pytest.mark.parametrize("name", ["gpt", "resnet", "llama", "bert"])
def test_bits_and_peak_are_those_of_a_wrapper(name: str) -> None:
    torch.manual_seed(0)
    model, sample = hugging_face(name) if name in ("llama", "bert") else network(name)
    model.train()
    plain, wrapped = deepcopy(model), Rockmate(deepcopy(model), sample, **FLOPS)
    compiling = Compiling()
    compiled = torch.compile(model, backend=compiling, options=FLOPS)
    assert same(trained(compiled, model, [sample] * 3), trained(plain, plain, [sample] * 3))
    (plan,) = compiling.plans()
    if name != "llama":  # which makes a mask for its attention where dynamo looks on
        assert plan.budget_bytes == wrapped.plan.budget_bytes
        assert plan.peak_bytes == wrapped.plan.peak_bytes
    assert compiling.graphs[0].graph.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.filterwarnings("ignore")
def test_other_sizes_come_by_recompilation_and_keep_the_budget() -> None:
    model = Layers()
    plain, compiling = deepcopy(model), Compiling()
    compiled = torch.compile(model, backend=compiling, options=FLOPS)
    samples = [torch.randn(rows, 32) for rows in (128, 96, 64, 128)]
    assert same(trained(compiled, model, samples), trained(plain, plain, samples))
    assert len(compiling.graphs) == 2  # the second one for any number of rows
    assert len({plan.budget_bytes for plan in compiling.plans()}) == 1


@pytest.mark.filterwarnings("ignore")
def test_parameters_are_inputs_where_one_graph_serves_two_models() -> None:
    models = [Layers(), Layers()]
    plains, compiling = deepcopy(models), Compiling()
    compiled = [torch.compile(model, backend=compiling, options=FLOPS) for model in models]
    for _ in range(2):
        for ours, model, plain in zip(compiled, models, plains, strict=True):
            samples = [torch.randn(64, 32) for _ in range(2)]
            assert same(trained(ours, model, samples), trained(plain, plain, samples))
    assert len(compiling.graphs) == 1


def breaking(model: nn.Module, name: str) -> None:
    """Let dynamo break a model behind one of its layers."""
    layer = model.get_submodule(BREAKS[name])

    class Breaking(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            torch._dynamo.graph_break()
            return result

    layer.__class__ = Breaking


BREAKS = {"gpt": "blocks.1", "resnet": "stages.1"}
BREAKS |= {"llama": "model.layers.0", "bert": "bert.encoder.layer.0"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BREAKS)
def test_bits_and_peak_are_those_of_a_wrapper_behind_graph_breaks(name: str) -> None:
    torch.manual_seed(0)
    model, sample = hugging_face(name) if name in ("llama", "bert") else network(name)
    model.train()
    plain, wrapped = deepcopy(model), Rockmate(deepcopy(model), sample, **FLOPS)
    breaking(model, name)
    compiling = Compiling()
    compiled = torch.compile(model, backend=compiling, options=FLOPS)
    assert same(trained(compiled, model, [sample] * 3), trained(plain, plain, [sample] * 3))
    assert compiling.parts.count(True) > 1
    assert False not in compiling.parts
    assert isinstance(model, Rockmate)
    assert model.budget_bytes == wrapped.budget_bytes
    assert model.plan.peak_bytes == model.measured_peak_bytes == wrapped.plan.peak_bytes
    call(compiled, sample).backward()  # from now on parameters have gradients
    trace = trace_memory(lambda _: call(compiled, sample).backward(), torch.device("cpu"))
    assert trace.peak_bytes <= model.budget_bytes


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_serves_several_layers_has_the_parameters_of_each() -> None:
    model = Layers(breaks=True)
    plain, compiling = deepcopy(model), Compiling()
    options = {**FLOPS, "budget": "600KiB"}
    compiled = torch.compile(model, backend=compiling, options=options)
    samples = [torch.randn(256, 32)]  # one step, in which nothing is planned yet
    assert same(trained(compiled, model, samples), trained(plain, plain, samples))
    assert len(compiling.graphs) == 2  # for four layers: the first input needs no gradient
    samples = [torch.randn(rows, 32) for rows in (256, 128, 256)]
    assert same(trained(compiled, model, samples), trained(plain, plain, samples))
    assert len(compiling.graphs) == 2
    assert model.plan.budget_bytes == 600 << 10
    model.eval()
    with torch.no_grad():
        assert torch.equal(compiled(samples[0]), plain.eval()(samples[0]))
    rockmate.remove(model)
    assert type(model) is Layers


@pytest.mark.filterwarnings("ignore")
def test_a_broken_model_within_too_little_is_refused_with_the_smallest_budget() -> None:
    model = Layers(breaks=True)
    compiled = torch.compile(model, backend=dynamo.rockmate, options={**FLOPS, "budget": "9KiB"})
    sample = torch.randn(64, 32)
    compiled(sample).backward()
    with pytest.raises(InfeasibleBudgetError, match="at least") as error:
        compiled(sample)
    assert error.value.minimum_bytes > 9 << 10


@pytest.mark.filterwarnings("ignore")
def test_a_broken_function_is_refused_where_two_graphs_would_share_the_budget() -> None:
    sample, both = torch.randn(64, 32), [nn.Linear(32, 32) for _ in range(2)]

    def step(x: Tensor) -> Tensor:
        x = both[0](x)
        torch._dynamo.graph_break()
        return both[1](x)

    compiled: Any = torch.compile(step, backend=dynamo.rockmate, options={"budget": "1MiB"})
    with pytest.raises(UnsupportedModuleError, match="fullgraph=True names the line"):
        compiled(sample)


@pytest.mark.filterwarnings("ignore")
def test_what_waits_for_its_backward_refuses_the_next_and_the_model_stays() -> None:
    model = Layers()
    options = {**FLOPS, "budget": "1MiB"}
    compiled = torch.compile(model, backend=dynamo.rockmate, options=options)
    sample = torch.randn(64, 32)
    kept = compiled(sample)
    with pytest.raises(UnsupportedModuleError, match="options of their own"):
        compiled(sample)  # the same graph twice before any backward
    kept.backward()
    compiled(sample).backward()
    model.load_state_dict((plain := Layers()).state_dict())
    model.zero_grad()
    assert same(trained(model, model, [sample]), trained(plain, plain, [sample]))


@pytest.mark.filterwarnings("ignore")
def test_evaluation_runs_plain_and_does_not_wait_for_a_backward() -> None:
    model = Layers()
    compiling = Compiling()
    compiled = torch.compile(model, backend=compiling, options=FLOPS)
    sample = torch.randn(64, 32)
    compiled(sample).backward()
    model.eval()
    with torch.no_grad():
        assert torch.equal(compiled(sample), model(sample))
    model.train()
    compiled(sample)  # and dropped
    compiled(sample).backward()
    assert len(compiling.plans()) == 1


def test_the_budget_comes_from_options_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = Layers(), torch.randn(64, 32)
    with pytest.raises(rockmate.ArgumentsError, match=r"torch\.compile\(.* needs a budget"):
        torch.compile(model, backend=dynamo.rockmate)(sample)
    with pytest.raises(rockmate.ArgumentsError, match="did you mean 'budget'"):
        torch.compile(model, backend=dynamo.rockmate, options={"budgt": 1})(sample)
    torch._dynamo.reset()
    monkeypatch.setenv("ROCKMATE_BUDGET", "1KiB")
    with pytest.raises(InfeasibleBudgetError):
        torch.compile(model, backend=dynamo.rockmate)(sample)


def test_the_entry_point_leads_here() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    found = re.search(r'entry-points.torch_dynamo_backends\]\nrockmate = "(.*)"\n', project)
    assert found is not None
    assert resolve_name(found[1]) is dynamo.rockmate


@pytest.mark.filterwarnings("ignore")
def test_torch_knows_it_by_name() -> None:
    if not entry_points(group="torch_dynamo_backends", name="rockmate"):
        pytest.skip("rockmate was installed before it had this entry point")
    model = Layers()
    compiled = torch.compile(model, backend="rockmate", fullgraph=True, options=FLOPS)
    plain = deepcopy(model)
    samples = [torch.randn(64, 32)]
    assert same(trained(compiled, model, samples), trained(plain, plain, samples))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning.pytorch"])
def test_trainers_take_a_model_that_compiles_itself_so(library: str, tmp_path: Path) -> None:
    found = pytest.importorskip(library, reason=f"{library} is a test extra")
    torch.manual_seed(0)
    model, sample = hugging_face("llama")
    rows = [dict.fromkeys(sample, row) for row in sample["input_ids"]]
    plain, compiling = deepcopy(model), Compiling()
    for module in (plain, model):
        if module is model:
            module.compile(backend=compiling, options=FLOPS)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(rows * 3, batch_size=4)
        if library == "transformers":
            arguments = found.TrainingArguments(
                str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[],
                use_cpu=True, save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            found.Trainer(module, arguments, train_dataset=rows * 3).train()
        elif library == "accelerate":
            accelerator = found.Accelerator(cpu=True)
            network, optimizer, loader = accelerator.prepare(module, optimizer, loader)
            for batch in loader:
                accelerator.backward(network(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        else:

            class Task(found.LightningModule):  # type: ignore[name-defined,misc]
                def __init__(self, network: nn.Module) -> None:
                    super().__init__()
                    self.network = network

                def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
                    return self.network(**batch).loss

                def configure_optimizers(self) -> torch.optim.Optimizer:
                    return torch.optim.SGD(self.parameters(), lr=0.1)

            found.Trainer(
                max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            ).fit(Task(module), loader)  # fmt: skip
    assert isinstance(model, Rockmate) or compiling.plans()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_accelerate_takes_the_name_once_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is a test extra")
    transformers = pytest.importorskip("transformers", reason="transformers is a test extra")
    from rockmate.integrations import register_with_accelerate

    names = accelerate.utils.DynamoBackend.list()
    for _ in range(2):
        register_with_accelerate()
    assert accelerate.utils.DynamoBackend.list() == [*dict.fromkeys([*names, "ROCKMATE"])]
    monkeypatch.setenv("ROCKMATE_BUDGET", "0.8")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the trainer sets both
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    torch.manual_seed(0)
    model, sample = hugging_face("llama")
    rows = [dict.fromkeys(sample, row) for row in sample["input_ids"]]
    plain, planned = deepcopy(model), []
    by_name = {"torch_compile_backend": "rockmate", "torch_compile_mode": "reduce-overhead"}
    for module, more in ((plain, {}), (model, by_name)):
        torch._dynamo.reset()
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, **more,
        )  # fmt: skip
        trainer = transformers.Trainer(module, arguments, train_dataset=rows * 3)
        trainer.train()
        planned.append(isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule))
    assert planned == [False, True]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
