"""The page pool: nobody's page is handed out twice, none is lost, and packing moves what must move."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_hpc.rollout.pages import PagePool


def test_the_lowest_free_pages_come_first():
    pool = PagePool(6)
    assert pool.take(3) == [0, 1, 2]
    pool.release([1])
    assert pool.take(2) == [1, 3]
    assert (pool.num_free, pool.num_used, pool.high_water) == (2, 4, 4)


def test_packing_fills_the_holes_from_the_top():
    pool = PagePool(8)
    pool.take(7)
    pool.release([0, 2, 3, 4])
    assert pool.is_fragmented
    assert pool.pack() == {6: 0, 5: 2}
    assert (pool.high_water, pool.is_fragmented) == (3, False)
    assert pool.take(5) == [3, 4, 5, 6, 7]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "pack"]), st.integers(0, 5)), max_size=60))
def test_the_pool_agrees_with_a_plain_count(operations):
    pool, held = PagePool(12), []
    for name, number in operations:
        if name == "take" and number <= pool.num_free:
            pages = pool.take(number)
            assert not {page for some in held for page in some} & set(pages)
            held.append(pages)
        elif name == "share" and held:
            pool.share(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif name == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif name == "pack":
            moves = pool.pack()
            assert not set(moves) & set(moves.values())
            held = [[moves.get(page, page) for page in some] for some in held]
            assert pool.high_water == pool.num_used
        used = {page for some in held for page in some}
        assert pool.num_used == len(used)
        assert all(pool._holders[page] == sum(some.count(page) for some in held) for page in range(12))
        assert pool.high_water == max(used, default=-1) + 1
