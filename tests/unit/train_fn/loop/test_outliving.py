"""What user code holds beside states, and whether it has changed."""

from __future__ import annotations

import decimal
import io
import random
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import iniconfig
import pytest
import torch
from pydantic import BaseModel
from torch import nn
from torch._inductor import async_compile
from tqdm import tqdm

from tests.integration import habits
from train_fn.checks import left_behind
from train_fn.checks.left_behind import TooMuch, held_values
from train_fn.loop.survivor import (
    Beginning,
    _changed,
    _children,
    _of_thread,
    _settings,
    _threads_since,
)
from train_fn.step import place_watch

VALUES = (
    *sorted({*habits.COUNTS_IN, *habits.KEPT} - {"attribute_of_torch", "compressor"}),
    *("forward_hook", "gradient_hook", "replaced_module"),
    "teacher",
    "of_weight",
    "global_count",
    "global_dict",
    "deep_count",
    "class_count",
    "default_argument",
    "closure",
    "function_attribute",
    "global_iterator",
    "global_generator",
    "cache",
)


@pytest.fixture(autouse=True)
def few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the modules of other tests, as no training process imports a whole suite."""
    is_followed = left_behind._is_followed

    def is_near(named: tuple[str, Any]) -> bool:
        is_other = named[0].startswith(("benchmarks.", "tests."))
        return is_followed(named) and (not is_other or named[0] in (__name__, habits.__name__))

    monkeypatch.setattr(left_behind, "_is_followed", is_near)


def changed_by(habit: str) -> tuple[str, ...]:
    """Return what a pass and the end of an epoch change, in a thread of its own as attempts are."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_changed_by, habit).result()


def _changed_by(habit: str) -> tuple[str, ...]:
    task: Any = habits.Habitual([habits.HABITS[habit]()])
    model = task.build_model()
    owners = {"Task": task, **dict(model.named_modules())}
    [found] = task._habits

    def train() -> None:
        found.factor(task, model)
        found.epoch_end(task, model)

    habits.first_answer.cache_clear()
    random.seed(1)
    train()
    before = held_values(owners, model.parameters())
    if habit not in ("local", "context"):  # the thread of the next attempt would find nothing there
        assert _changed(before, held_values(owners, model.parameters())) == ()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    habits.first_answer.cache_clear()
    random.seed(2)
    train()
    return _changed(before, held_values(owners, model.parameters()))


@pytest.mark.parametrize("habit", VALUES)
def test_a_change_is_found_wherever_it_is_held(habit: str) -> None:
    assert changed_by(habit)


@pytest.mark.parametrize("habit", sorted(habits.KNOWN))
def test_what_a_state_holds_or_is_put_back_is_no_change(habit: str) -> None:
    assert changed_by(habit) == ()


@pytest.mark.parametrize("habit", habits.BUILDS)
def test_what_a_thread_has_of_its_own_is_compared_with_its_beginning(habit: str) -> None:
    """A thread begins with what is built in, and the next attempt has another one."""
    change, read = habits.BUILDS[habit]
    found: list[Any] = []

    def attempt() -> None:
        task: Any = habits.Habitual([])
        before, values = _of_thread(), held_values({"Task": task}, ())
        assert _changed(before, _of_thread()) == ()
        earlier = str(read())
        change()
        found.append(_changed(before, _of_thread()))
        found.append(_changed(values, held_values({"Task": task}, ())))
        found.append(str(read()) != earlier)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    of_thread, values, is_another = found
    assert (of_thread or values) and is_another


def test_a_node_of_autograd_that_code_holds_may_have_hooks() -> None:
    habits.hook_accumulator([torch.nn.Linear(1, 1)])
    try:
        before = held_values({}, ())
        assert any("NODES" in name for name in _changed(before, held_values({}, ())))
    finally:
        habits.NODES.clear()


def test_a_flag_that_is_raised_is_found() -> None:
    habits.FLAG.clear()
    before = held_values({}, ())
    habits.FLAG.set()
    assert any("FLAG" in name for name in _changed(before, held_values({}, ())))


class _Deferred(BaseModel, defer_build=True):
    """Pydantic gives it parts that raise at every attribute until it is used."""

    number: int = 1


class _Proxy:
    """Raises as proxies of web frameworks do before their object is there."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("nothing is there")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("nothing is there")


@pytest.mark.parametrize("is_proxy", [False, True])
def test_an_object_that_raises_where_it_is_looked_at_breaks_nothing(
    is_proxy: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a mistake of our own hide there: the log says what cannot be looked at."""
    caplog.set_level("INFO", left_behind.__name__)
    monkeypatch.setattr(habits, "HELD", [_Proxy() if is_proxy else _Deferred], raising=False)
    changed = _changed(held_values({}, ()), held_values({}, ()))
    assert all("HELD" in text for text in caplog.messages)
    assert bool(caplog.messages) is is_proxy
    assert any("HELD" in name for name in changed) is is_proxy, "what cannot be seen may change"


@pytest.mark.parametrize("habit", ["default_precision", "fast_path", "filled_memory"])
def test_a_setting_that_can_be_read_is_compared(habit: str) -> None:
    change, _ = habits.CHANGES[habit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decimal.DefaultContext, "prec", decimal.DefaultContext.prec)
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        before = _settings()
        try:
            change()
            assert len(_changed(before, _settings())) == 1
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_layers_that_list_their_weights_and_wrap_functions_have_not_changed() -> None:
    task: Any = habits.Habitual([])
    model = nn.ModuleDict({"lstm": nn.LSTM(2, 2), "heads": nn.MultiheadAttention(2, 1)})
    owners = {"Task": task, **dict(model.named_modules())}
    before = held_values(owners, model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model["lstm"](torch.ones(1, 1, 2))
    assert _changed(before, held_values(owners, model.parameters())) == ()


def test_more_than_can_be_compared_is_told() -> None:
    task: Any = habits.Habitual([])
    task.many = [habits.Held(number) for number in range(30_000)]
    with pytest.raises(TooMuch):
        held_values({"Task": task}, ())
    task.many = list(range(1_000_000))  # plain values are compared at once
    before = held_values({"Task": task}, ())
    task.many[-1] = 0
    assert _changed(before, held_values({"Task": task}, ())) == ("Task.many",)


def test_threads_and_children_that_run_on_are_found_and_idle_ones_too() -> None:
    began, ends = Beginning(), threading.Event()
    thread = threading.Thread(target=ends.wait, name="users-own")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _threads_since(began) == ("users-own",)
    assert any(str(child.pid) in found for found in _children(()))
    assert not any(str(child.pid) in found for found in _children([child.pid]))
    ends.set()
    thread.join()
    child.communicate()
    assert _threads_since(began) == ()
    assert not any(str(child.pid) in found for found in _children(()))


def test_threads_that_compile_and_draw_bars_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in code of Python's own, as a user's would."""
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    async_compile.AsyncCompile.pool.cache_clear()
    monkeypatch.setattr(tqdm, "monitor", None)  # another test's bar may have started one
    began = Beginning()
    with tqdm(total=1, file=io.StringIO()):
        async_compile.AsyncCompile.pool().submit(int).result()
        new = {each.name for each in threading.enumerate() if each.ident not in began.threads}
        assert len(new) == 2 and "tqdm_monitor" in new, new
        assert _threads_since(began) == ()
    with ThreadPoolExecutor(1, "of-user") as pool:
        pool.submit(int).result()
        assert _threads_since(began) == ("of-user_0",)


def test_what_extensions_note_of_an_error_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that passes through a Cython extension, as Ray's, sets this."""
    made = types.ModuleType("cython_runtime")
    monkeypatch.setitem(sys.modules, "cython_runtime", made)
    before = held_values({}, [])
    vars(made)["cline_in_traceback"] = False
    assert _changed(before, held_values({}, [])) == ()


def test_an_installed_package_is_the_users_if_the_task_is_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place_watch, "_of_tasks", set())
    monkeypatch.setattr(iniconfig, "STEPS", 0, raising=False)

    def changed() -> tuple[str, ...]:
        before = held_values({}, ())
        iniconfig.STEPS += 1  # type: ignore[attr-defined]
        return _changed(before, held_values({}, ()))

    assert changed() == ()
    place_watch.note_package_of(type("Task", (), {"__module__": "iniconfig.tasks"})())
    assert changed() == ("iniconfig.STEPS",)


def test_threads_that_end_with_the_attempt_are_not_left_behind() -> None:
    """A loader's processes are fed by some, which run until it is closed."""
    began, ends = Beginning(), threading.Event()
    thread = threading.Thread(target=ends.wait, name="feeds")
    thread.start()
    try:
        assert _threads_since(began) == ("feeds",)
        assert _threads_since(began, [thread.ident]) == ()
    finally:
        ends.set()
        thread.join()
