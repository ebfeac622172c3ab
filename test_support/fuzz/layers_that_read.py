"""Forms of layers that reach beyond what they are given: state, Python, other tensors, hooks.

Everything here is legal PyTorch. Each form has what a loop may change of what it reads.
"""

from __future__ import annotations

from fuzz.layers import ANY, IMAGES, LAST, ROWS, Form, of_function
from fuzz.layers_of_effects import EFFECTS
from fuzz.layers_of_objects import OBJECTS

_FUNCTIONS = {
    "own square": (
        "ctx.save_for_backward(x)\n        return x * x",
        "return 2 * grad * ctx.saved_tensors[0]",
    ),
    "own scale": ("ctx.scale = 0.7\n        return x * ctx.scale", "return grad * ctx.scale"),
    "reversed gradient": ("return x.view_as(x)", "return -grad"),
    "own result": (
        "y = x.exp().clamp(max=3)\n        ctx.save_for_backward(y)\n        return y",
        "return grad * ctx.saved_tensors[0]",
    ),
    "gradient made in forward": (
        "ctx.save_for_backward(torch.cos(x))\n        return torch.sin(x)",
        "return ctx.saved_tensors[0].mul_(grad)",
    ),
    "gradient written": ("return x * 2", "return grad.clone().mul_(2)"),
    "function in numpy": (
        "ctx.save_for_backward(x)\n        return torch.from_numpy(np.sin(x.detach().numpy()))",
        "return grad * torch.from_numpy(np.cos(ctx.saved_tensors[0].numpy()))",
    ),
}


FUNCTIONS = {name: of_function(*parts) for name, parts in _FUNCTIONS.items()}

PYTHON = {
    "global number": Form(
        "x = x * SCALE_N", top="SCALE_N = 0.5", changes=("globals()['SCALE_N'] = VALUE",), weight=2
    ),
    "global table": Form(
        "x = x * CONFIG_N['scale']",
        top="CONFIG_N = {'scale': 0.5}",
        changes=("CONFIG_N['scale'] = VALUE",),
        weight=2,
    ),
    "global object": Form(
        "x = x * OPTIONS_N.scale",
        top="class OPTIONS_N:\n    scale = 0.5\n",
        changes=("OPTIONS_N.scale = VALUE",),
    ),
    "global list": Form(
        "x = x * LIST_N[-1]",
        top="LIST_N = [0.5]",
        changes=("LIST_N.append(VALUE)", "LIST_N[-1] = VALUE"),
    ),
    "global function": Form(
        "x = double_N(x)",
        top="def double_N(x):\n    return x * 2\n",
        changes=("globals()['double_N'] = lambda x: x * VALUE",),
    ),
    "closure": Form(
        "x = self.scaled_N(x)",
        "cell_N = {'scale': 0.5}\nself.cell_N = cell_N\n"
        "self.scaled_N = lambda x: x * cell_N['scale']",
        changes=("OWN.cell_N['scale'] = VALUE",),
        weight=2,
    ),
    "cell of a closure": Form(
        "x = self.scaled_N(x)",
        "scale_N = 0.5\n\ndef scaled_N(x):\n    return x * scale_N\n\ndef set_N(value):\n"
        "    nonlocal scale_N\n    scale_N = value\n\n"
        "self.scaled_N, self.set_N = scaled_N, set_N",
        changes=("OWN.set_N(VALUE)",),
    ),
    "default of a function": Form(
        "x = scaled_N(x)",
        top="def scaled_N(x, how=[0.5]):\n    return x * how[0]\n",
        changes=("scaled_N.__defaults__[0][0] = VALUE", "scaled_N.__defaults__ = ([VALUE],)"),
    ),
    "iterator": Form(
        "x = x * next(self.numbers_N)", "self.numbers_N = iter(range(1, 1000))", weight=2
    ),
    "generator": Form(
        "x = x * next(self.numbers_N)", "self.numbers_N = (1 / n for n in range(1, 1000))"
    ),
    "global iterator": Form(
        "x = x / next(NUMBERS_N)", top="NUMBERS_N = itertools.count(1)", weight=1
    ),
    "list that shrinks": Form(
        "x = x * self.numbers_N.pop()", "self.numbers_N = [n / 50 for n in range(100)]"
    ),
    "counter": Form(
        "self.calls_N += 1\nx = x / self.calls_N", "self.calls_N = 0", changes=("OWN.calls_N = 0",)
    ),
    "global counter": Form(
        "CALLS_N['count'] += 1\nx = x / CALLS_N['count']", top="CALLS_N = {'count': 0}"
    ),
    "log": Form("LOG_N.append(x.shape[0])", top="LOG_N = []"),
    "number": Form(
        "x = x * self.factor_N + self.factor_N",
        "self.factor_N = 0.5",
        changes=("OWN.factor_N = VALUE", "OWN.factor_N = 1 + int(VALUE)"),
        weight=2,
    ),
    "power": Form(
        "x = x.abs() ** self.power_N", "self.power_N = 2", changes=("OWN.power_N = VALUE",)
    ),
    "switch": Form(
        "if self.on_N:\n    x = torch.tanh(x)",
        "self.on_N = True",
        changes=("OWN.on_N = not OWN.on_N",),
    ),
    "text": Form(
        "x = getattr(torch, self.name_N)(x)",
        "self.name_N = 'tanh'",
        changes=("OWN.name_N = 'sin'",),
    ),
    "object": Form(
        "x = x * self.options_N.scale",
        "self.options_N = types.SimpleNamespace(scale=0.5)",
        changes=("OWN.options_N.scale = VALUE",),
        weight=2,
    ),
    "table of settings": Form(
        "x = x * self.table_N['scale']",
        "self.table_N = {'scale': 0.5}",
        changes=("OWN.table_N['scale'] = VALUE",),
    ),
    "external tensor": Form(
        "x = x * EXTERNAL_N",
        top="EXTERNAL_N = torch.full((1,), 0.5)",
        changes=("EXTERNAL_N.fill_(VALUE)", "globals()['EXTERNAL_N'] = torch.full((1,), VALUE)"),
        weight=2,
    ),
    "kept tensor": Form(
        "x = x + self.kept_N",
        "self.kept_N = torch.full((1,), 0.5)",
        changes=(
            "OWN.kept_N = torch.full((1,), VALUE)",
            "OWN.kept_N.mul_(VALUE)",
            "OWN.kept_N.data = torch.full((1,), VALUE)",
        ),
        weight=2,
    ),
    "listed tensor": Form(
        "x = x + self.parts_N[0]",
        "self.parts_N = [torch.full((1,), 0.5)]",
        changes=("OWN.parts_N[0] = torch.full((1,), VALUE)", "OWN.parts_N[0].mul_(VALUE)"),
    ),
    "external weight": Form(
        "x = x * WEIGHT_N",
        top="WEIGHT_N = torch.full((1,), 0.5, requires_grad=True)",
        changes=("WEIGHT_N.data.fill_(VALUE)",),
    ),
    "random choice": Form("if random.random() < 0.5:\n    x = torch.tanh(x)", weight=0.5),
    "numpy's random choice": Form("x = x * float(np.random.rand())", weight=0.5),
    "generator by seed": Form(
        "chance_N = torch.Generator(x.device).manual_seed(self.seed_N)\n"
        "x = x + torch.rand(x.shape[-1], generator=chance_N)",
        "self.seed_N = 1",
        changes=("OWN.seed_N += 1",),
    ),
    "kept generator": Form(
        "x = x + torch.rand(x.shape[-1], generator=self.chance_N)",
        "self.chance_N = torch.Generator(torch.get_default_device()).manual_seed(3)",
        weight=0.5,
    ),
    "times the argument": Form("x = x * k", weight=2),
    "branch on the argument": Form("x = torch.tanh(x) if k > 1 else torch.sin(x)"),
    "fails": Form(
        "if self.fails_N:\n    self.fails_N = False\n    raise ValueError('as was asked')",
        "self.fails_N = False",
        changes=("OWN.fails_N = True",),
        weight=0.7,
    ),
}

# A branch on computed values, numpy and the like: the module around it runs whole.
OPAQUE = {
    "branch": Form("if x.mean() > 0:\n    x = x * 0.5", weight=2),
    "rare branch": Form("if x.mean() > 100:\n    x = x * 0.5", weight=2),
    "branch and argument": Form("if x.mean() > 100:\n    x = x * 0.5\nx = x * k", weight=2),
    "item": Form("x = x / (1 + abs(x.detach().mean().item()))"),
    "numpy": Form("x = x * torch.from_numpy(np.cos(x.detach().numpy()))"),
    "chosen numbers": Form("x = x + x[x > 0].sum()"),
    "branch and number": Form(
        "if x.mean() > 100:\n    x = x * 0.5\nx = x * self.factor_N",
        "self.factor_N = 0.5",
        changes=("OWN.factor_N = VALUE",),
        weight=2,
    ),
    "branch and counter": Form(
        "self.calls_N += 1\nif x.mean() > 100:\n    x = x * 0.5\nx = x / self.calls_N",
        "self.calls_N = 0",
    ),
    "branch and dropout": Form("if x.mean() > 100:\n    x = x * 0.5\nx = F.dropout(x, 0.2)"),
    "branch and table": Form(
        "if x.mean() > 100:\n    x = x * 0.5\nx = x * RATES_N['rate']",
        top="RATES_N = {'rate': 2}",
        changes=("RATES_N['rate'] = VALUE",),
    ),
    "inner gradient": Form(
        "part_N = x.detach().requires_grad_()\n"
        "x = x - 0.1 * torch.autograd.grad(part_N.pow(3).sum(), part_N)[0]"
    ),
    "vmap": Form("x = torch.func.vmap(torch.tanh)(x)"),
}

STATE = {
    "count of steps": Form(
        "self.steps_N.add_(1)\nx = x / self.steps_N",
        "self.register_buffer('steps_N', torch.zeros(1))",
        weight=2,
    ),
    "running mean": Form(
        "self.mean_N.mul_(0.9).add_(0.1 * x.detach().mean())\nx = x - self.mean_N",
        "self.register_buffer('mean_N', torch.zeros(1))",
        changes=("OWN.mean_N.zero_()", "OWN.mean_N = OWN.mean_N + VALUE"),
        weight=2,
    ),
    "running scale": Form(
        "self.scale_N.mul_(0.9).add_(0.1 * x.detach().abs().mean())\n"
        "x = torch.tanh(x) * self.scale_N",
        "self.register_buffer('scale_N', torch.ones(1))",
        changes=("OWN.scale_N.fill_(VALUE)", "OWN.scale_N.data.fill_(VALUE)"),
        weight=2,
    ),
    "buffer replaced": Form(
        "self.mean_N = 0.9 * self.mean_N + 0.1 * x.detach().mean()\nx = x * self.mean_N",
        "self.register_buffer('mean_N', torch.ones(1))",
    ),
    "buffer written after": Form(
        "x = x + self.last_N\nself.last_N.copy_(x.detach().mean().reshape(1))",
        "self.register_buffer('last_N', torch.ones(1))",
        weight=2,
    ),
    "codebook": Form(
        "x = x * F.embedding(x.detach().argmax(-1), self.code_N)\nwith torch.no_grad():\n"
        "    self.code_N[:4].mul_(0.9)",
        "self.register_buffer('code_N', torch.randn(8, 8))",
        kinds=LAST,
        weight=2,
    ),
    "view of a buffer": Form(
        "x = x + self.rows_N[0]\nself.rows_N[0].add_(0.1)",
        "self.register_buffer('rows_N', torch.ones(2, 1))",
    ),
    "weight of unit norm": Form(
        "with torch.no_grad():\n    self.weight_N.div_(self.weight_N.norm())\n"
        "x = F.linear(x, self.weight_N)",
        "self.weight_N = nn.Parameter(torch.randn(8, 8))",
        kinds=LAST,
        weight=2,
    ),
    "weight that decays": Form(
        "with torch.no_grad():\n    self.layer_N.weight.mul_(0.95)\nx = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)",
        kinds=LAST,
    ),
    "data of a weight": Form(
        "self.layer_N.weight.data = self.layer_N.weight.data * 0.9\nx = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)",
        kinds=LAST,
    ),
    "bounded look-up": Form(
        "x = x + self.table_N(x.detach().argmax(-1))",
        "self.table_N = nn.Embedding(8, 8, max_norm=1.0)",
        kinds=LAST,
    ),
    "follower": Form(
        "with torch.no_grad():\n    self.slow_N.weight.lerp_(self.fast_N.weight, 0.1)\n"
        "x = self.fast_N(x) - self.slow_N(x).detach()",
        "self.fast_N, self.slow_N = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)",
        kinds=LAST,
    ),
    "kept result": Form("self.kept_N = x", weight=2, changes=("journal.add('kept', OWN.kept_N)",)),
    "kept with its gradient": Form(
        "self.kept_N = x\nif x.requires_grad:\n    x.retain_grad()", weight=2
    ),
    "kept and detached": Form("self.kept_N = x.detach()"),
    "kept norm": Form("self.norm_N = x.detach().norm()"),
    "listed results": Form("self.parts_N = [x]\nx = torch.tanh(x)\nself.parts_N.append(x)"),
    "state": Form(
        "self.state_N = 0.5 * self.state_N.detach() + x.mean()\nx = x + self.state_N",
        "self.state_N = torch.zeros(())",
        weight=2,
        changes=("OWN.state_N = torch.zeros(())",),
    ),
    "state with history": Form(
        "self.state_N = 0.5 * self.state_N + x.mean()\nx = x + self.state_N",
        "self.state_N = torch.zeros(())",
        changes=("OWN.state_N = torch.zeros(())", "OWN.state_N = OWN.state_N.detach()"),
        weight=2,
    ),
    "input written": Form("x.mul_(0.5)", weight=0.3),
}

HOOKS = {
    "hook on a result": Form(
        "if x.requires_grad:\n    x.register_hook(lambda g: g * 0.5)", weight=2
    ),
    "random hook on a result": Form(
        "if x.requires_grad:\n    x.register_hook(lambda g: g + 0.1 * torch.randn_like(g))"
    ),
    "hook that watches": Form(
        "if x.requires_grad:\n    x.register_hook(lambda g: setattr(self, 'seen_N', g.norm()))"
    ),
    "forward hook": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\n"
        "self.layer_N.register_forward_hook(lambda m, args, out: out * 0.5)",
        kinds=LAST,
    ),
    "pre-hook": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\n"
        "self.layer_N.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))",
        kinds=LAST,
    ),
    "feature hook": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\n"
        "self.layer_N.register_forward_hook(lambda m, args, out: setattr(m, 'feature', out))",
        kinds=LAST,
    ),
    "backward hook": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\n"
        "self.layer_N.register_full_backward_hook(lambda m, ins, outs: (ins[0] * 0.5,))",
        kinds=LAST,
    ),
    "weight hook": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\n"
        "self.layer_N.weight.register_hook(lambda g: g + 0.1 * torch.randn_like(g))",
        kinds=LAST,
        weight=2,
    ),
}

FORMS = ROWS | ANY | IMAGES | FUNCTIONS | PYTHON | OBJECTS | EFFECTS | OPAQUE | STATE | HOOKS
PLAIN = frozenset(ROWS | ANY | IMAGES)  # what most layers of a network are drawn from
