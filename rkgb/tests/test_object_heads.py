"""What the heads of objects say: the same until something changes, and no longer."""

import functools

import pytest

from rkgb.torch_api import heads_of, items_of_all, object_heads


class Held:
    def __init__(self):
        self.value = 0


class Other(Held):
    pass


def called(value=1, *, named=2):
    return value, named


def _around():
    value = 1
    return lambda: value


HELD, TABLE, AROUND, BOUND = Held(), {"a": 1}, _around(), functools.partial(int, "1")
FIELDS = [(called, name) for name in ("__code__", "__defaults__", "__kwdefaults__")]
LISTED, CHOSEN, CHANGING = [], set(), type("Changing", (Held,), {})
FIELDS += [(CHANGING, "__bases__"), (AROUND.__closure__[0], "cell_contents"), (BOUND, "args")]


@pytest.mark.skipif(not object_heads._can_be_read, reason="heads are laid out otherwise here")
@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(HELD, "value", HELD.value + 1),
        lambda: setattr(HELD, "__class__", Other if type(HELD) is Held else Held),
        lambda: TABLE.update(a=2),
        lambda: TABLE.update({len(TABLE): 1}),
        lambda: setattr(called, "__code__", called.__code__.replace()),
        lambda: setattr(called, "__defaults__", (3,)),
        lambda: setattr(called, "__kwdefaults__", {"named": 3}),
        lambda: setattr(AROUND.__closure__[0], "cell_contents", object()),
        lambda: LISTED.append(1),
        lambda: CHOSEN.add(len(CHOSEN)),
        lambda: setattr(CHANGING, "__bases__", (Other,)),
        lambda: BOUND.__setstate__((int, ("2",), {}, {})),
    ],
)
def test_every_change_is_seen(change):
    read = heads_of([HELD], [TABLE, LISTED, CHOSEN], [vars(HELD), TABLE], FIELDS)
    before = read()
    assert read() == before
    change()
    assert read() != before


def test_where_something_has_no_place_in_heads_nothing_is_read():
    assert heads_of([], [], [], [(called, "__closure__")]) is None


ONE, TWO = object(), object()


@pytest.mark.skipif(not object_heads._can_be_read, reason="heads are laid out otherwise here")
@pytest.mark.parametrize(
    "change",
    [
        lambda listed, _: listed.__setitem__(0, TWO),
        lambda listed, _: listed.append(ONE),
        lambda listed, _: listed.reverse(),
        lambda listed, _: listed.clear(),
        lambda _, held: held.add(TWO),
        lambda _, held: held.discard(ONE),
        lambda _, held: (held.discard(ONE), held.add(TWO)),
        lambda _, held: held.update(range(100)),
    ],
)
@pytest.mark.parametrize("count", [0, 40])
def test_every_change_of_items_is_seen(change, count):
    listed, held = [ONE, 1, *range(count)], {ONE, 1, *range(count)}
    containers = [[5], listed, held, {7}]
    holds = items_of_all(containers)
    assert holds()
    assert holds()
    change(listed, held)
    assert not holds()


def test_memory_that_lists_have_left_is_not_read():
    many = [[*range(20_000)] for _ in range(50)]
    holds = items_of_all(many)
    for listed in many:
        listed.clear()
    del listed
    assert holds is None or not holds()
