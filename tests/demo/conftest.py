from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from talker import talker_model, talker_tokenizer

from forebay.engine.models import LoadedModel, adopt_model


@pytest.fixture(scope="session")
def talker() -> LoadedModel:
    return adopt_model(talker_model(), talker_tokenizer(), name="talker")
