"""The rules against the executor that defines them: on every random pipeline they find exactly the same edges."""

import pytest
from hypothesis import given, seed, settings

from spangraph.pipeline import Pipeline
from spangraph.testing import SimulatedDevice

from .pipelines import found_by_executor, found_by_rules, pipelines

DEVICE = SimulatedDevice()


@pytest.mark.parametrize("number", range(4))
def test_the_rules_find_what_the_executor_finds(number: int) -> None:
    @seed(number)
    @settings(max_examples=500, deadline=None, database=None)
    @given(pipelines())
    def check(pipeline: Pipeline) -> None:
        for walk in pipeline.walks:
            assert found_by_rules(pipeline, walk) == found_by_executor(pipeline, walk, DEVICE)[0], walk

    check()
