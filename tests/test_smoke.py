from mergegit import Repository
from tests.families import EXPERTS, Family


def test_a_merge_from_add_to_checkout(loaded: Repository, family: Family, tmp_path) -> None:
    recipe = loaded.recipe(EXPERTS, method="ties", parameters={"density": 0.5})
    report = loaded.merge(loaded.plan(recipe, budget="10%"), branch="merged")
    assert report.read_bytes == report.plan.plan.planned_bytes
    loaded.checkout("merged", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (
        family.base / "config.json"
    ).read_bytes()
