"""The page pool: nobody's page is handed out twice, none is lost, and packing moves what must move."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_hpc.rollout.scheduler import PagePool


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "pack"]), st.integers(0, 5)), max_size=60))
def test_the_pool_agrees_with_a_plain_count(operations):
    pool, held = PagePool(12), []
    for name, number in operations:
        if name == "take" and number <= pool.num_free:
            taken = {page for some in held for page in some}
            pages = pool.take_pages(number)
            assert pages == [page for page in range(12) if page not in taken][:number], "the lowest that are free"
            held.append(pages)
        elif name == "share" and held:
            pool.share(held[number % len(held)])
            held.append(list(held[number % len(held)]))
        elif name == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif name == "pack":
            num_moved = sum(page >= pool.num_used for page in {page for some in held for page in some})
            moves = pool.compact()
            assert not set(moves) & set(moves.values()) and len(moves) == num_moved, "what stands in the way alone"
            held = [[moves.get(page, page) for page in some] for some in held]
            assert pool.high_water == pool.num_used
        used = {page for some in held for page in some}
        assert pool.num_used == len(used)
        assert all(pool._holders[page] == sum(some.count(page) for some in held) for page in range(12))
        assert pool.high_water == max(used, default=-1) + 1
        assert pool.is_fragmented == (len(used) < 0.75 * pool.high_water)
