"""Grounds that are spread evenly: soon every kind of memory and both kinds of cache were there, whatever the seed."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from isolate.search.even import Even
from isolate.search.fuzz import LAUNCHED_WEIGHTS, SNAPSHOTS, WEIGHTS, Space, ground
from isolate.zoo import ZOO


@pytest.mark.parametrize("seed", range(20))
def test_a_few_places_have_all_kinds_of_memory_and_cache(seed: int) -> None:
    grounds = [ground(Even(seed, place), Space()) for place in range(8)]
    assert {here.recipe.memory for here in grounds} == {"attention", "window", "recurrent", "hybrid"}
    assert {here.context.kv_unified for here in grounds} == {True, False}
    assert len({here.recipe.name for here in grounds}) >= 6


def test_every_model_comes_with_every_type_of_weights_and_every_number_of_snapshots() -> None:
    """Draws that hang together would leave pairs out for ever."""
    for space, types in ((Space(), WEIGHTS), (Space(launches=True), LAUNCHED_WEIGHTS)):
        grounds = [ground(Even(3, place), space) for place in range(1500)]
        pairs = {(here.recipe.name, here.model.type) for here in grounds}
        assert len(pairs) == len(ZOO) * len(types)
    grounds = [ground(Even(3, place), Space(snapshots=True)) for place in range(1500)]
    for name in SNAPSHOTS:
        assert {here.context.n_rs_seq for here in grounds if here.recipe.name == name} >= {UNSET, 1, 2, 4, 8}


@pytest.mark.parametrize("seed", range(10))
def test_pairs_of_model_and_weights_come_soon(seed: int) -> None:
    """By chance 150 places have 82 of the 110."""
    grounds = [ground(Even(seed, place), Space(launches=True)) for place in range(150)]
    assert len({(here.recipe.name, here.model.type) for here in grounds}) > 85


def test_draws_differ_by_seed_and_by_place_and_are_the_same_again() -> None:
    def draws(seed: int, place: int) -> list[float]:
        chance = Even(seed, place)
        return [chance.random() for _ in range(30)]

    assert draws(1, 5) == draws(1, 5)
    assert draws(1, 5) != draws(1, 6)
    assert draws(1, 5) != draws(2, 5)
    assert all(0 <= draw < 1 for draw in draws(1, 5))
    assert len(set(draws(1, 5))) == 30


def test_every_choice_is_made_as_often_as_by_chance() -> None:
    names = [ground(Even(1, place), Space()).recipe.name for place in range(1100)]
    assert all(90 <= names.count(name) <= 110 for name in set(names))
