"""The control's cache: whatever the step, what is read is the run's first rollout, also after a restart."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tlt_hpc.drafting.pool import TrainingPool
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.studies.ablate.first_rollouts import FirstRollouts, first_file


def open_cache(path: Path, rank: int = 0) -> FirstRollouts:
    return FirstRollouts(RunFolder(path), rank, 1, 4, 10**9)


def write(cache: FeatureCache, step: int, num: int = 3) -> None:
    """A step of documents whose first token names step and rank."""
    writer = cache.begin_step(step, step)
    for i in range(num):
        tokens = np.full(20 + i, 100 * cache._rank + step, np.int32)
        writer.append(tokens, 5, np.zeros((len(tokens) - 1, 1, 4), np.uint16))


def drawn(cache: FeatureCache) -> set[int]:
    """What the pool draws from: the names of steps and ranks."""
    pool = TrainingPool(cache, random.Random(0))
    pool.refresh()
    names = {int(e.document.tokens[0]) for _ in range(40) for e in pool.draw(200)}
    pool.close()
    return names


def test_later_steps_train_on_the_first_step_of_all_ranks(tmp_path: Path) -> None:
    caches = [open_cache(tmp_path, rank) for rank in range(2)]
    for step in range(5):
        for cache in caches:
            write(cache, step)
        if step == 0:
            assert [drawn(cache) for cache in caches] == [{0}, {100}], "the own open file of the first step"
        else:
            assert [drawn(cache) for cache in caches] == [{0, 100}, {0, 100}], step
        for cache in caches:
            cache.end_step()
    assert 0 not in RunFolder(tmp_path).cache_steps(), "kept apart, the cache itself is bounded as ever"


def test_a_restart_finds_them(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    for step in range(3):
        write(cache, step)
        cache.end_step()
    again = open_cache(tmp_path)
    again.recover()
    write(again, 3)
    assert drawn(again) == {0}


@pytest.mark.parametrize("links", [True, False])
def test_killed_between_the_first_step_and_the_second(tmp_path: Path, monkeypatch, links: bool) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("this file system has no hard links")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    cache = open_cache(tmp_path)
    write(cache, 0)
    cache.end_step()
    assert not first_file(RunFolder(tmp_path), 0).exists()
    again = open_cache(tmp_path)
    write(again, 1)
    assert drawn(again) == {0}
    assert list(first_file(RunFolder(tmp_path), 0).parent.iterdir()) == [first_file(RunFolder(tmp_path), 0)]


def test_a_run_rewound_to_its_start_forgets_the_old_first_step(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    for step in range(2):
        write(cache, step)
        cache.end_step()
    write(cache, 0, num=1)
    cache.end_step()
    write(cache, 1)
    pool = TrainingPool(cache, random.Random(0))
    pool.refresh()
    assert len(pool) == 1
    pool.close()


def test_a_damaged_file_is_left_out(tmp_path: Path, caplog) -> None:
    caches = [open_cache(tmp_path, rank) for rank in range(2)]
    for step in range(2):
        for cache in caches:
            write(cache, step)
        if step == 0:
            for cache in caches:
                cache.end_step()
    path = first_file(RunFolder(tmp_path), 1)
    path.write_bytes(path.read_bytes()[:-10])
    assert drawn(caches[0]) == {0}
    assert "rank-0001.h5" in caplog.text
