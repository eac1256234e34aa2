"""Pages of tasks with long commands, on both kinds of stores: none is too large, and together they have all."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_manager.tasks import pages
from tests.manager.cluster import cluster_of
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import submit


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize(("limit", "sizes"), [(2, [2, 2, 2, 1]), (1000, [4, 3])])
async def test_a_page_ends_where_its_commands_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]
) -> None:
    # More than three commands are enough for a page, and five rows are read at once.
    monkeypatch.setattr(pages, "MOST_CHARACTERS", 3 * 2052 + 1)
    monkeypatch.setattr(pages, "READ_AT_ONCE", 5)
    async with cluster_of(tmp_path, **settings(FakeEngine(far=2))) as cluster:
        for number in range(7):
            await submit(cluster, f"t-{number}", command=["true", "x" * 2048])
        found: list[int] = []
        names: list[str] = []
        after = ""
        while not found or after:
            page = await cluster.get(f"/v1/tasks?limit={limit}{after}")
            found.append(len(page["tasks"]))
            names += [row["name"] for row in page["tasks"]]
            after = f"&after={page['next']}" if page["next"] is not None else ""
        assert found == sizes
        assert names == [f"t-{number}" for number in reversed(range(7))]
