"""Forms of events: what a training loop does, in a few lines.

`X` and `Y` are batches (and the call's other argument, where the network has one), `SIZE` their
size, `VALUE` a number, `FLAG` a truth, `TOTAL` a scalar of the outputs `outs`, `BACKWARD` a
statement that runs backward from them. The loop has `model`, `optimizer`, `journal`, `waiting`.
"""

from __future__ import annotations

from dataclasses import dataclass

TOTALS = {
    "mean square": "outs[0].square().mean()",
    "sum": "outs[0].sum()",
    "mean": "outs[0].mean()",
    "all": "sum(out.square().mean() for out in outs)",
    "last": "outs[-1].square().mean()",
    "last sum": "outs[-1].sum()",
    "entropy": "torch.logsumexp(outs[0], -1).mean()",
    "part": "outs[0][:1].square().sum()",
    "two": "outs[0].sum() + outs[-1].mean()",
}
LOSSES = {name: f"({text}).backward()" for name, text in TOTALS.items()} | {
    "ones": "outs[0].backward(torch.ones_like(outs[0]))",
    "random": "outs[0].backward(torch.randn_like(outs[0]))",
    "other layout": (
        "grad = torch.randn_like(outs[0])\n"
        "outs[0].backward(grad.transpose(0, -1).contiguous().transpose(0, -1))"
    ),
    "channels last": (
        "grad = torch.randn_like(outs[0])\n"
        "if grad.dim() == 4:\n    grad = grad.contiguous(memory_format=torch.channels_last)\n"
        "outs[0].backward(grad)"
    ),
    "expanded": "outs[0].backward(torch.ones(()).expand_as(outs[0]))",
    "several": "torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])",
    "of weights": (
        "wanted = [p for p in model.parameters() if p.requires_grad]\n"
        "journal.add('gradients', torch.autograd.grad(\n"
        "    outs[0].square().mean(), wanted, allow_unused=True))"
    ),
    "of the last output": (
        "journal.add('gradients', torch.autograd.grad(\n"
        "    outs[0].square().mean(), outs[-1:], allow_unused=True))"
    ),
}


@dataclass(frozen=True)
class EventForm:
    """How an event is written, and how often it is drawn."""

    text: str
    weight: float = 1.0


EVENTS = {
    "step": EventForm(
        "model.zero_grad(set_to_none=FLAG)\nouts = journal.outputs(model(X))\nBACKWARD\n"
        "optimizer.step()",
        12,
    ),
    "backward alone": EventForm("outs = journal.outputs(model(X))\nBACKWARD", 5),
    "two forwards, one backward": EventForm(
        "outs = journal.outputs(model(X))\nfirst = TOTAL\nouts = journal.outputs(model(Y))\n"
        "(first + 2 * TOTAL).backward()",
        3,
    ),
    "two forwards, first backward first": EventForm(
        "outs = journal.outputs(model(X))\nfirst = TOTAL\nouts = journal.outputs(model(Y))\n"
        "second = TOTAL\nfirst.backward()\nsecond.backward()",
        2,
    ),
    "two forwards, last backward first": EventForm(
        "outs = journal.outputs(model(X))\nfirst = TOTAL\nouts = journal.outputs(model(Y))\n"
        "second = TOTAL\nsecond.backward()\nfirst.backward()",
        2,
    ),
    "no_grad between": EventForm(
        "outs = journal.outputs(model(X))\nwith torch.no_grad():\n"
        "    journal.outputs(model(Y))\nBACKWARD",
        2,
    ),
    "eval between": EventForm(
        "outs = journal.outputs(model(X))\nmodel.eval()\nwith torch.no_grad():\n"
        "    journal.outputs(model(Y))\nmodel.train()\nBACKWARD"
    ),
    "eval with gradients": EventForm(
        "model.eval()\nouts = journal.outputs(model(X))\nBACKWARD\nmodel.train()"
    ),
    "forward mode": EventForm(
        "x = batch(SIZE, SEED)\nwith fwAD.dual_level():\n"
        "    x = fwAD.make_dual(x, torch.ones_like(x))\n"
        "    outs = journal.outputs(model(INPUT))\n"
        "    journal.add('tangents', [fwAD.unpack_dual(out).tangent for out in outs])\nBACKWARD",
        0.7,
    ),
    "inference": EventForm("with torch.inference_mode():\n    journal.outputs(model(X))"),
    "part in eval": EventForm(
        "list(model.modules())[-1].train(FLAG)\nouts = journal.outputs(model(X))\nBACKWARD"
    ),
    "freeze": EventForm(
        "for p in list(model.parameters())[CHOICE::3]:\n    p.requires_grad_(FLAG)", 2
    ),
    "freeze in between": EventForm(
        "outs = journal.outputs(model(X))\nfor p in list(model.parameters())[CHOICE::3]:\n"
        "    p.requires_grad_(FLAG)\nBACKWARD"
    ),
    "unfreeze": EventForm("model.requires_grad_(True)"),
    "noise on gradients": EventForm(
        "for p in list(model.parameters())[CHOICE::2]:\n    if p.requires_grad:\n"
        "        p.register_hook(lambda g: g + 0.1 * torch.randn_like(g))",
        2,
    ),
    "order of gradients": EventForm(
        "order = []\nfor n, p in model.named_parameters():\n    if p.requires_grad:\n"
        "        p.register_post_accumulate_grad_hook(lambda p, n=n: order.append(n))\n"
        "outs = journal.outputs(model(X))\nBACKWARD\njournal.add('order', order)"
    ),
    "hook on an output": EventForm(
        "outs = journal.outputs(model(X))\nouts[-1].register_hook(lambda g: g * VALUE)\nBACKWARD", 2
    ),
    "output's gradient kept": EventForm(
        "outs = journal.outputs(model(X))\nfor out in outs:\n    out.retain_grad()\nBACKWARD\n"
        "journal.add('grads of outputs', [out.grad for out in outs])",
        2,
    ),
    "input's gradient": EventForm(
        "x = batch(SIZE, SEED).requires_grad_()\nouts = journal.outputs(model(INPUT))\nBACKWARD\n"
        "journal.add('grad of input', x.grad)",
        2,
    ),
    "output written": EventForm("outs = journal.outputs(model(X))\nouts[0].mul_(VALUE)\nBACKWARD"),
    "two backwards": EventForm(
        "outs = journal.outputs(model(X))\nTOTAL.backward(retain_graph=True)\nTOTAL.backward()"
    ),
    "forward alone": EventForm("waiting.append(journal.outputs(model(X)))", 1.5),
    "backward of one before": EventForm("outs = waiting.pop()\nBACKWARD", 2),
    "forward forgotten": EventForm("journal.outputs(model(X))"),
    "update in between": EventForm(
        "outs = journal.outputs(model(X))\noptimizer.step()\nBACKWARD", 0.5
    ),
    "gradients gone in between": EventForm(
        "outs = journal.outputs(model(X))\nmodel.zero_grad(set_to_none=FLAG)\nBACKWARD"
    ),
    "error in backward": EventForm(
        "def fail(grad):\n    raise ValueError('as was asked')\n\n"
        "outs = journal.outputs(model(X))\nouts[0].register_hook(fail)\nBACKWARD"
    ),
    "error at a weight": EventForm(
        "def fail(grad):\n    raise ValueError('as was asked')\n\n"
        "weights = [p for p in model.parameters() if p.requires_grad]\n"
        "hook = weights[CHOICE % len(weights)].register_hook(fail)\n"
        "try:\n    outs = journal.outputs(model(X))\n    BACKWARD\nfinally:\n    hook.remove()"
    ),
    "state loaded": EventForm(
        "state = model.state_dict()\n"
        "state = {n: t * 0.9 if t.is_floating_point() else t for n, t in state.items()}\n"
        "model.load_state_dict(state)"
    ),
    "state loaded in between": EventForm(
        "state = {n: t.clone() for n, t in model.state_dict().items()}\n"
        "outs = journal.outputs(model(X))\nmodel.load_state_dict(state)\nBACKWARD"
    ),
    "buffers written in between": EventForm(
        "outs = journal.outputs(model(X))\nfor b in model.buffers():\n    b.mul_(2)\nBACKWARD"
    ),
    "weights through data": EventForm("for p in model.parameters():\n    p.data = p.data * 0.9"),
    "another thread": EventForm(
        "with other_thread():\n    outs = journal.outputs(model(X))\n    BACKWARD"
    ),
    "in another thread": EventForm(
        "with concurrent.futures.ThreadPoolExecutor(1) as pool:\n"
        "    outs = journal.outputs(pool.submit(model, X).result())\nBACKWARD"
    ),
    "autocast": EventForm(
        "with torch.autocast(torch.get_default_device().type, torch.bfloat16):\n"
        "    outs = journal.outputs(model(X))\nBACKWARD",
        2,
    ),
    "copy": EventForm("model = copy.deepcopy(model)\nouts = journal.outputs(model(X))\nBACKWARD"),
    "precision": EventForm("model.double().float()", 0.5),
    "global hook": EventForm(
        "hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: None)\n"
        "outs = journal.outputs(model(X))\nhook.remove()\nBACKWARD",
        0.5,
    ),
    "checkpoint around": EventForm(
        "outs = journal.outputs(checkpoint(model, X, use_reentrant=False))\nBACKWARD", 0.7
    ),
    "hooks on saved tensors": EventForm(
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):\n"
        "    outs = journal.outputs(model(X))\nBACKWARD",
        0.7,
    ),
    "strided input": EventForm("outs = journal.outputs(model(strided(X)))\nBACKWARD"),
    "seeded": EventForm("torch.manual_seed(SEED)\nouts = journal.outputs(model(X))\nBACKWARD"),
    "clipped": EventForm(
        "outs = journal.outputs(model(X))\nBACKWARD\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    ),
    "bytes": EventForm(
        "x = batch(SIZE, SEED)\n\ndef step():\n"
        "    outs = journal.held(model(INPUT))\n"
        "    outs[0].sum().backward()\n\n"
        "journal.peak(step, model)",
        2,
    ),
    "bytes in another layout": EventForm(
        "x = batch(SIZE, SEED)\ngrad = torch.randn_like(journal.outputs(model(INPUT))[0])\n"
        "grad = grad.transpose(0, -1).contiguous().transpose(0, -1) if grad.dim() else grad\n\n"
        "def step():\n    journal.held(model(INPUT))[0].backward(grad)\n\n"
        "journal.peak(step, model)"
    ),
    "change": EventForm("CHANGE", 6),
    "change in between": EventForm("outs = journal.outputs(model(X))\nCHANGE\nBACKWARD", 1.5),
}
