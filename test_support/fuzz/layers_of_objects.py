"""Forms of layers that read objects as programs have them: made once, bound, kept, counted, nested.

Each has what a loop may change of what it reads, in place and by another object.
"""

from __future__ import annotations

from fuzz.layers import LAST, Form

OBJECTS = {
    "cached property": Form(
        "x = x * self.factor_N.scale",
        "self.factor_N = Factor_N()",
        top="class Factor_N:\n    base = 0.5\n\n    @functools.cached_property\n"
        "    def scale(self):\n        return self.base * 2\n",
        changes=(
            "OWN.factor_N.__dict__.pop('scale', None)",
            "OWN.factor_N.__dict__['scale'] = VALUE",
            "OWN.factor_N = type(OWN.factor_N)()\nOWN.factor_N.base = VALUE",
        ),
        weight=2,
    ),
    "function made once": Form(
        "if 'it' not in MADE_N:\n    MADE_N['it'] = lambda x, by=self.by_N: x * by\n"
        "x = MADE_N['it'](x)",
        "self.by_N = 0.5",
        top="MADE_N = {}",
        changes=("MADE_N.clear()\nOWN.by_N = VALUE", "MADE_N['it'] = lambda x: x * VALUE"),
        weight=2,
    ),
    "tensor made once": Form(
        "if self.mask_N is None:\n    self.mask_N = torch.full_like(x[..., :1].detach(), 0.5)[:1]\n"
        "x = x * self.mask_N",
        "self.mask_N = None",
        changes=("OWN.mask_N = None", "OWN.mask_N = torch.full((1,), VALUE)"),
        weight=2,
    ),
    "memory of a function": Form(
        "x = x * scale_N(x.dim())",
        top="@functools.lru_cache\ndef scale_N(number):\n    return 1 / (1 + number)\n",
        changes=("scale_N.cache_clear()",),
        weight=0.5,
    ),
    "table of a function": Form(
        "x = x * table_N(x.shape[-1])",
        top="@functools.lru_cache(maxsize=2)\ndef table_N(size):\n"
        "    return torch.linspace(0.5, 1, size)\n",
        changes=("table_N.cache_clear()", "table_N(8).mul_(0.9)", "table_N(3)"),
    ),
    "memory of an object": Form(
        "x = x * self.memory_N.scale(x.dim())",
        "self.memory_N = Memory_N()",
        top="class Memory_N:\n    base = 0.5\n\n    @functools.lru_cache\n"
        "    def scale(self, number):\n        return self.base / number\n",
        changes=("OWN.memory_N.base = VALUE", "type(OWN.memory_N).scale.cache_clear()"),
        weight=0.5,
    ),
    "property": Form(
        "x = x * self.dial_N.scale",
        "self.dial_N = Dial_N()",
        top="class Dial_N:\n    turns = 1\n\n    @property\n    def scale(self):\n"
        "        return 1 / (1 + self.turns)\n",
        changes=("OWN.dial_N.turns += 1", "type(OWN.dial_N).scale = VALUE"),
    ),
    "class of a module": Form(
        "x = x * self.scale_of_class_N",
        "type(self).scale_of_class_N = 0.5\nKINDS_N.append(type(self))",
        top="KINDS_N = []",
        changes=("KINDS_N[-1].scale_of_class_N = VALUE", "OWN.scale_of_class_N = VALUE"),
    ),
    "class of an object": Form(
        "x = x * self.gauge_N.read()",
        "self.gauge_N = Gauge_N()",
        top="class Gauge_N:\n    def read(self):\n        return 0.5\n\n\n"
        "class Other_N(Gauge_N):\n    def read(self):\n        return 2.0\n",
        changes=(
            "OWN.gauge_N.__class__ = Other_N",
            "OWN.gauge_N.read = lambda: VALUE",
            "Gauge_N.read = lambda self: VALUE",
        ),
    ),
    "object with slots": Form(
        "x = x * self.slots_N.scale",
        "self.slots_N = Slots_N()",
        top="class Slots_N:\n    __slots__ = ('scale',)\n\n    def __init__(self):\n"
        "        self.scale = 0.5\n",
        changes=("OWN.slots_N.scale = VALUE",),
    ),
    "frozen settings": Form(
        "x = x * SETTINGS_N.scale",
        top="Settings_N = dataclasses.make_dataclass('Settings', ['scale'], frozen=True)\n"
        "SETTINGS_N = Settings_N(0.5)",
        changes=(
            "globals()['SETTINGS_N'] = Settings_N(VALUE)",
            "object.__setattr__(SETTINGS_N, 'scale', VALUE)",
        ),
    ),
    "numbers of numpy": Form(
        "x = x * float(ARRAY_N[0])",
        top="ARRAY_N = np.full(2, 0.5)",
        changes=("ARRAY_N[0] = VALUE", "globals()['ARRAY_N'] = np.full(2, VALUE)"),
        weight=2,
    ),
    "memory of numpy": Form(
        "x = x * torch.from_numpy(ARRAY_N)",
        top="ARRAY_N = np.full(1, 0.5, np.float32)",
        changes=("ARRAY_N[0] = VALUE", "globals()['ARRAY_N'] = np.full(1, VALUE, np.float32)"),
        weight=2,
    ),
    "partial": Form(
        "x = self.times_N(x)",
        "self.times_N = functools.partial(torch.mul, other=0.5)",
        changes=(
            "OWN.times_N.keywords['other'] = VALUE",
            "OWN.times_N = functools.partial(torch.mul, other=VALUE)",
        ),
    ),
    "queue": Form(
        "x = x * self.queue_N[-1]",
        "self.queue_N = collections.deque([0.25, 0.5], maxlen=2)",
        changes=("OWN.queue_N.append(VALUE)", "OWN.queue_N.rotate(1)"),
    ),
    "set": Form(
        "x = torch.tanh(x) if 'tanh' in WAYS_N else x * len(WAYS_N)",
        top="WAYS_N = {'tanh'}",
        changes=("WAYS_N.discard('tanh')", "WAYS_N.add(VALUE)"),
    ),
    "view of a table": Form(
        "x = x * VIEW_N['scale']",
        top="UNDER_N = {'scale': 0.5}\nVIEW_N = types.MappingProxyType(UNDER_N)",
        changes=("UNDER_N['scale'] = VALUE",),
    ),
    "context": Form(
        "x = x * SCALE_N.get()",
        top="SCALE_N = contextvars.ContextVar('scale', default=0.5)",
        changes=("SCALE_N.set(VALUE)",),
    ),
    "weak reference": Form(
        "x = x * self.ref_N().scale",
        "self.ref_N = weakref.ref(HELD_N[0])",
        top="class Held_N:\n    scale = 0.5\n\n\nHELD_N = [Held_N()]",
        changes=("HELD_N[0].scale = VALUE",),
    ),
    "scales of a generator": Form(
        "for scale_N in scales_N():\n    x = x * scale_N",
        top="LIST_N = [0.5, 0.75]\n\n\ndef scales_N():\n    yield from LIST_N\n",
        changes=("LIST_N.append(VALUE)", "LIST_N[0] = VALUE"),
    ),
    "operators": Form(
        "x = x * self.pair_N['it'] + len(self.pair_N) + sum(self.pair_N)",
        "self.pair_N = Pair_N()",
        top="class Pair_N:\n    def __init__(self):\n        self.own = [0.5, 2]\n\n"
        "    def __getitem__(self, key):\n        return self.own[0]\n\n"
        "    def __len__(self):\n        return len(self.own)\n\n"
        "    def __iter__(self):\n        return iter(self.own)\n",
        changes=("OWN.pair_N.own.append(1)", "OWN.pair_N.own[0] = VALUE"),
    ),
    "perhaps nothing": Form(
        "if SHIFT_N is not None:\n    x = x + SHIFT_N",
        top="SHIFT_N = None",
        changes=("globals()['SHIFT_N'] = VALUE", "globals()['SHIFT_N'] = torch.full((1,), VALUE)"),
        weight=2,
    ),
    "submodule by name": Form(
        "x = self.ways_N[self.way_N](x)",
        "self.ways_N = nn.ModuleDict({'a': nn.Tanh(), 'b': nn.Linear(8, 8)})\nself.way_N = 'b'",
        changes=("OWN.way_N = 'a'", "OWN.ways_N['b'] = nn.Sigmoid()"),
        kinds=LAST,
    ),
    "submodules in turn": Form(
        "for part in self.parts_N:\n    x = part(x)",
        "self.parts_N = nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])",
        changes=(
            "OWN.parts_N = nn.ModuleList(reversed(OWN.parts_N))",
            "OWN.parts_N.append(nn.Sigmoid())",
            "OWN.parts_N[1] = nn.ReLU()",
        ),
        kinds=LAST,
    ),
    "method of a module": Form(
        "x = self.inner_N(x)",
        "self.inner_N = types.MethodType(lambda own, x: x * own.by_N, self)\nself.by_N = 0.5",
        changes=(
            "OWN.by_N = VALUE",
            "OWN.inner_N = types.MethodType(lambda own, x: x + own.by_N, OWN)",
        ),
    ),
    "mark on a weight": Form(
        "x = self.layer_N(x) * self.layer_N.weight.mark",
        "self.layer_N = nn.Linear(8, 8)\nself.layer_N.weight.mark = 0.5",
        changes=("OWN.layer_N.weight.mark = VALUE",),
        kinds=LAST,
    ),
    "wanted gradients": Form(
        "x = self.layer_N(x)\nif self.layer_N.bias.requires_grad:\n    x = x * 0.5",
        "self.layer_N = nn.Linear(8, 8)",
        changes=("OWN.layer_N.bias.requires_grad_(not OWN.layer_N.bias.requires_grad)",),
        kinds=LAST,
    ),
    "prints": Form("print('a layer', tuple(x.shape))\nx = x * 1.5"),
    "prints a value": Form("print('the mean', x.mean().item())\nx = x * 1.5"),
    "branch and object": Form(
        "if x.mean() > 100:\n    x = x * 0.5\nx = x * self.factor_N.scale",
        "self.factor_N = Factor_N()",
        top="class Factor_N:\n    base = 0.5\n\n    @functools.cached_property\n"
        "    def scale(self):\n        return self.base * 2\n",
        changes=(
            "OWN.factor_N.__dict__.pop('scale', None)",
            "OWN.factor_N.__dict__['scale'] = VALUE",
        ),
    ),
    "branch and numbers of numpy": Form(
        "if x.mean() > 100:\n    x = x * 0.5\nx = x * float(ARRAY_N[0])",
        top="ARRAY_N = np.full(2, 0.5)",
        changes=("ARRAY_N[0] = VALUE",),
    ),
    "branch and memory of numpy": Form(
        "if x.mean() > 100:\n    x = x * 0.5\nx = x * torch.from_numpy(ARRAY_N)",
        top="ARRAY_N = np.full(1, 0.5, np.float32)",
        changes=("ARRAY_N[0] = VALUE",),
    ),
    "branch and weight": Form(
        "if x.mean() > 100:\n    x = x * 0.5\nx = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)",
        changes=(
            "OWN.layer_N.weight.requires_grad_(not OWN.layer_N.weight.requires_grad)",
            "OWN.layer_N.weight.data = OWN.layer_N.weight.data * VALUE",
        ),
        kinds=LAST,
        weight=2,
    ),
    "loop to a bound": Form("while x.abs().max() > 4:\n    x = x * 0.5"),
    "hook that keeps a gradient": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\nself.layer_N.register_full_backward_hook("
        "lambda m, ins, outs: setattr(self, 'seen_N', outs[0]))",
        kinds=LAST,
    ),
    "hook before a backward": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\nself.layer_N.register_full_backward_pre_hook("
        "lambda m, outs: (outs[0] * 0.5,))",
        kinds=LAST,
    ),
    "step in a hook": Form(
        "x = self.layer_N(x)",
        "self.layer_N = nn.Linear(8, 8)\n\ndef step_N(p):\n    with torch.no_grad():\n"
        "        p.sub_(p.grad, alpha=0.01)\n    p.grad = None\n\n"
        "self.layer_N.bias.register_post_accumulate_grad_hook(step_N)",
        kinds=LAST,
    ),
    "questions to a tensor": Form(
        "x = x * (1 + x._version + 2 * x.is_leaf + 4 * (x._base is None))\n"
        "x = x / (2 + x.storage_offset() + (x.grad_fn is None))"
    ),
    "two of a factory": Form(
        "x = self.second_N(self.first_N(x))",
        "self.first_N, _ = scaling_N(0.5)\nself.second_N, self.set_N = scaling_N(0.7)",
        top="def scaling_N(scale, turns=0):\n"
        "    def scaled(x):\n        return x * sum(scale for _ in range(2)) / (1 + turns)\n\n"
        "    def set_both(value):\n        nonlocal scale, turns\n"
        "        scale, turns = value, turns + 1\n\n"
        "    return scaled, set_both\n",
        changes=("OWN.set_N(VALUE)",),
        weight=2,
    ),
    "counters of a factory": Form(
        "x = self.second_N(self.first_N(x))",
        "self.first_N, self.second_N = counting_N(0), counting_N(1)",
        top="def counting_N(count):\n    def counted(x):\n        nonlocal count\n"
        "        count += 1\n        return x * count / (1 + count)\n\n    return counted\n",
        weight=0.5,
    ),
    "one tensor given twice": Form(
        "x = self.same_N(x, x)",
        "self.same_N = Same_N()",
        top="class Same_N(nn.Module):\n    def forward(self, a, b):\n"
        "        if float(a.detach().sum()) > 1e9:\n            return a\n"
        "        return a * 2 if a is b else a + b * 0.5\n",
    ),
    "argument returned": Form(
        "x = x * 1.0\nsame_N = self.pass_N(x)\nx = same_N * 2 if same_N is x else same_N * 3",
        "self.pass_N = Pass_N()",
        top="class Pass_N(nn.Module):\n    def forward(self, a):\n"
        "        return a if float(a.detach().sum()) < 1e9 else a * 2\n",
    ),
    "weight of its own given": Form(
        "x = self.part_N(x, self.part_N.weight)",
        "self.part_N = Part_N()",
        top="class Part_N(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(1))\n\n    def forward(self, a, weight):\n"
        "        scale = 2.0 if weight is self.weight else 3.0\n"
        "        return a * weight * (scale if float(a.detach().sum()) < 1e9 else 1.0)\n",
    ),
}
