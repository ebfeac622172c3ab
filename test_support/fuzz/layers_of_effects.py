"""Forms of layers that leave something behind, or ask which object it is: Python at its freest.

What they set, log, write and count is compared after every event: globals in capitals, attributes,
files. What a loop may change of it is in each form.
"""

from __future__ import annotations

from fuzz.layers import LAST, Form, of_function

_LAYER = "self.layer_N = nn.Linear(8, 8)"
# One for each process and number, empty when a run begins.
_FILE = (
    "path_N = os.path.join(tempfile.gettempdir(), f'fuzz-{os.getpid()}-_N')\n"
    "open(path_N, 'w').close()"
)

EFFECTS = {
    "type that is kept": Form(
        "if self.type_N is x.dtype:\n    x = x * 0.5\nself.type_N = x.dtype",
        "self.type_N = None",
        changes=("OWN.type_N = None", "OWN.type_N = torch.float64"),
    ),
    "mode of an enum": Form(
        "x = x * self.mode_N.value\n"
        "self.mode_N = Mode_N.B if self.mode_N is Mode_N.A else Mode_N.A",
        "self.mode_N = Mode_N.A",
        top="class Mode_N(enum.Enum):\n    A = 0.5\n    B = 0.7\n",
        changes=("OWN.mode_N = Mode_N.B",),
    ),
    "attribute that goes": Form(
        "x = x * (0.5 if hasattr(self, 'gone_N') else 0.7)\nself.__dict__.pop('gone_N', None)",
        "self.gone_N = 1",
        changes=("OWN.gone_N = 1",),
    ),
    "record that is kept": Form(
        "self.seen_N = {'rows': x.shape[0], 'last': self.seen_N['rows']}\n"
        "x = x / (1 + self.seen_N['last'])",
        "self.seen_N = {'rows': 1}",
        changes=("OWN.seen_N = {'rows': VALUE}",),
    ),
    "global that is set": Form(
        "global SET_N\nSET_N = SET_N % 3 + 1\nx = x / SET_N",
        top="SET_N = 1",
        changes=("globals()['SET_N'] = 2",),
    ),
    "count of a function": Form(
        "counted_N.calls += 1\nx = x / counted_N.calls\nCALLS_N[:] = [counted_N.calls]",
        top="CALLS_N = []\n\n\ndef counted_N():\n    pass\n\n\ncounted_N.calls = 0",
        changes=("counted_N.calls = 0",),
    ),
    "count of a class": Form(
        "type(self).count_N = getattr(type(self), 'count_N', 0) + 1\nx = x / type(self).count_N",
        "KINDS_N[:] = [type(self)]",  # that of a planned module derives from it
        top="KINDS_N = []",
        changes=("KINDS_N[0].count_N = 0",),
    ),
    "object that is called": Form(
        "x = self.called_N(x)",
        "self.called_N = Called_N()",
        top="class Called_N:\n    calls = 0\n\n    def __call__(self, x):\n"
        "        self.calls += 1\n        return x / self.calls\n",
        changes=("OWN.called_N.calls = 0",),
    ),
    "property that counts": Form(
        "self.meter_N.value = x.shape[0]\nx = x / self.meter_N.value",
        "self.meter_N = Meter_N()",
        top="READ_N = []\n\n\nclass Meter_N:\n    @property\n    def value(self):\n"
        "        READ_N.append(1)\n        return self.own + len(READ_N)\n\n"
        "    @value.setter\n    def value(self, number):\n        self.own = number\n",
        weight=0.5,
    ),
    "log of a library": Form(
        "logging.getLogger('net_N').warning('rows %d', x.shape[0])\nx = x * 1.5",
        top="SAID_N = []\nlogging.getLogger('net_N').propagate = False\n"
        "logging.getLogger('net_N').handlers[:] = [logging.Handler()]\n"
        "logging.getLogger('net_N').handlers[0].emit = lambda r: SAID_N.append(r.getMessage())",
    ),
    "file appended to": Form(
        "with open(path_N, 'a') as out_N:\n    out_N.write('.')\nx = x * 1.5",
        top=_FILE,
        changes=("with open(path_N) as file:\n    journal.add('file', file.read())",),
        weight=0.5,
    ),
    "file read": Form(
        "with open(path_N) as in_N:\n    x = x * (1 + len(in_N.read()))",
        top=_FILE,
        changes=("with open(path_N, 'a') as out:\n    out.write('.')",),
        weight=0.5,
    ),
    "environment": Form(
        "x = x * float(os.environ.get('FUZZ_N', '0.5'))",
        top="os.environ.pop('FUZZ_N', None)",
        changes=("os.environ['FUZZ_N'] = str(float(VALUE))",),
    ),
    "own part, elsewhere, too": Form(
        "x = self.layer_N(x) * (0.5 if self.layer_N is HELD_N[0] else 0.7)",
        f"{_LAYER}\nHELD_N[:] = [self.layer_N]",
        top="HELD_N = []",
        changes=("HELD_N[0] = None", "OWN.layer_N = nn.Linear(8, 8)"),
        kinds=LAST,
    ),
    "own part as a key": Form(
        "x = self.layer_N(x) * RATES_N[self.layer_N]",
        f"{_LAYER}\nRATES_N[self.layer_N] = 0.5",
        top="RATES_N = {}",
        changes=("RATES_N[OWN.layer_N] = VALUE",),
        kinds=LAST,
    ),
    "which tensor it is": Form(
        "x = x * (0.5 if self.kept_N is KEPT_N else 0.7)",
        "self.kept_N = KEPT_N",
        top="KEPT_N = torch.ones(1)",
        changes=("OWN.kept_N = torch.ones(1)", "globals()['KEPT_N'] = torch.ones(1)"),
    ),
    "own weight, elsewhere, too": Form(
        "x = self.layer_N(x) + HELD_N['weight'].mean()",
        f"{_LAYER}\nHELD_N['weight'] = self.layer_N.weight",
        top="HELD_N = {}",
        changes=(
            "HELD_N['weight'].data.mul_(0.5)",
            "OWN.layer_N.weight = nn.Parameter(torch.ones(8, 8))",
        ),
        kinds=LAST,
    ),
    "own buffer, elsewhere, too": Form(
        "HELD_N['steps'].add_(1)\nx = x / self.steps_N",
        "self.register_buffer('steps_N', torch.zeros(1))\nHELD_N['steps'] = self.steps_N",
        top="HELD_N = {}",
        changes=("HELD_N['steps'].zero_()", "OWN.steps_N = torch.ones(1)"),
    ),
    "layer outside": Form(
        "x = OUTSIDE_N(x)",
        top="OUTSIDE_N = nn.LayerNorm(8)",
        changes=(
            "OUTSIDE_N.weight.data.mul_(0.5)",
            "globals()['OUTSIDE_N'] = nn.LayerNorm(8)",
            "journal.add('gradient', OUTSIDE_N.weight.grad)",
        ),
        kinds=LAST,
    ),
    "listed layers": Form(
        "for part_N in self.parts_N:\n    x = part_N(x)",
        "self.parts_N = [nn.Linear(8, 8), nn.Tanh()]",
        changes=(
            "OWN.parts_N.reverse()",
            "OWN.parts_N[0] = nn.Linear(8, 8)",
            "journal.add('gradients', [p.grad for part in OWN.parts_N for p in part.parameters()])",
        ),
        kinds=LAST,
        weight=0.5,
    ),
    "backward that counts": of_function(
        "return x * 2",
        "COUNTS_N['calls'] += 1\n        return grad * COUNTS_N['calls']",
        "\n\nCOUNTS_N = {'calls': 0}",
        changes=("COUNTS_N['calls'] = 0",),
    ),
    "backward that draws": of_function("return x * 2", "return grad * random.random()", weight=0.5),
    "backward that keeps": of_function(
        "return x * 2", "NORMS_N[:] = [grad.norm()]\n        return grad * 2", "\n\nNORMS_N = []"
    ),
    "backward that reads": of_function(
        "return x * 2",
        "return grad * SCALE_N['it']",
        "\n\nSCALE_N = {'it': 0.5}",
        changes=("SCALE_N['it'] = VALUE",),
    ),
    "said once": Form(
        "say_N(x.dim())\nx = x * 1.5",
        top="SAID_N = []\n\n\n@functools.lru_cache\ndef say_N(number):\n"
        "    SAID_N.append(number)\n",
        changes=("say_N.cache_clear()",),
        weight=0.5,
    ),
    "what is not there": Form(
        "try:\n    x = x * TABLE_N['scale']\nexcept KeyError:\n    x = x * 0.7",
        top="TABLE_N = {}",
        changes=("TABLE_N['scale'] = VALUE", "TABLE_N.clear()"),
    ),
    "which class it is": Form(
        "x = x * (0.5 if isinstance(self.scale_N, int) else 0.7)",
        "self.scale_N = 1",
        changes=("OWN.scale_N = 1.0", "OWN.scale_N = True"),
    ),
    "pattern": Form(
        "match self.pattern_N:\n    case {'scale': scale_N}:\n        x = x * scale_N\n"
        "    case [*parts_N]:\n        x = x / (1 + len(parts_N))\n"
        "    case _:\n        x = torch.tanh(x)",
        "self.pattern_N = {'scale': 0.5}",
        changes=("OWN.pattern_N = [1, 2]", "OWN.pattern_N = {'scale': VALUE}"),
    ),
    "text of a number": Form(
        "x = x * float(f'{self.scale_N:.2f}')",
        "self.scale_N = 0.123",
        changes=("OWN.scale_N = float(VALUE)",),
    ),
    "manager with state": Form(
        "with scaled_N(0.5):\n    x = x * SCALES_N[-1]\nx = x * SCALES_N[-1]",
        top="SCALES_N = [0.7]\n\n\n@contextlib.contextmanager\ndef scaled_N(by):\n"
        "    SCALES_N.append(SCALES_N[-1] * by)\n    try:\n        yield\n    finally:\n"
        "        SCALES_N.pop()\n",
        changes=("SCALES_N[0] = VALUE",),
    ),
    "order of a table": Form(
        "for name_N in TABLE_N:\n    x = x * TABLE_N[name_N] - 0.5",
        top="TABLE_N = {'a': 0.5, 'b': 0.7}",
        changes=("TABLE_N['a'] = TABLE_N.pop('a')", "TABLE_N['c'] = VALUE"),
    ),
    "reduced list": Form(
        "x = x * functools.reduce(operator.mul, map(abs, LIST_N))",
        top="LIST_N = [0.5, -0.7]",
        changes=("LIST_N.append(0.5)", "LIST_N[0] = VALUE"),
    ),
    "arguments of a table": Form(
        "x = torch.add(x, *PLACES_N, **NAMES_N)",
        top="PLACES_N, NAMES_N = [0.5], {'alpha': 2}",
        changes=("NAMES_N['alpha'] = VALUE", "PLACES_N[0] = VALUE"),
    ),
    "bytes": Form(
        "x = x / BYTES_N[0]", top="BYTES_N = bytearray([2])", changes=("BYTES_N[0] = 3",)
    ),
    "array of numbers": Form(
        "x = x / ARRAY_N[0]",
        top="ARRAY_N = array.array('d', [2.0])",
        changes=("ARRAY_N[0] = VALUE + 1",),
    ),
    "numpy's generator": Form(
        "x = x * float(CHANCE_N.random())", top="CHANCE_N = np.random.default_rng(0)", weight=0.5
    ),
    "Python's generator": Form(
        "x = x * CHANCE_N.random()", top="CHANCE_N = random.Random(0)", weight=0.5
    ),
    "attributes of anything": Form(
        "x = x * self.open_N.scale",
        "self.open_N = Open_N()",
        top="class Open_N:\n    def __init__(self):\n        self.own = {'scale': 0.5}\n\n"
        "    def __getattr__(self, name):\n        if name.startswith('_'):\n"
        "            raise AttributeError(name)\n        return self.__dict__['own'][name]\n",
        changes=("OWN.open_N.own['scale'] = VALUE",),
    ),
    "descriptor": Form(
        "x = x * self.described_N.scale",
        "self.described_N = Described_N()",
        top="class Field_N:\n    def __get__(self, owner, kind):\n"
        "        return VALUES_N[len(VALUES_N) - 1]\n\n\n"
        "class Described_N:\n    scale = Field_N()\n\n\nVALUES_N = [0.5]",
        changes=("VALUES_N.append(VALUE)",),
    ),
}
