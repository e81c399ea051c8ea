"""The conformance suite of sources, over RabbitMQ."""

from __future__ import annotations

import pytest

from onceward.testing import Lab, PostgresLab
from onceward.testing.sources import SourceContract
from tests.broker_labs import RabbitMQLab
from tests.services import rabbitmq

pytestmark = pytest.mark.xdist_group("rabbitmq")


class TestClassic(SourceContract):
    @pytest.fixture
    async def broker(self, rabbitmq_server: rabbitmq.Broker) -> RabbitMQLab:
        lab = RabbitMQLab(rabbitmq_server, "classic")
        await lab.set_up()
        return lab

    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab


class TestQuorum(SourceContract):
    @pytest.fixture
    async def broker(self, rabbitmq_server: rabbitmq.Broker) -> RabbitMQLab:
        lab = RabbitMQLab(rabbitmq_server, "quorum")
        await lab.set_up()
        return lab

    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab
