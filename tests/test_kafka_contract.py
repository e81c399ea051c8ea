"""The conformance suite of sources, over Kafka."""

from __future__ import annotations

import pytest

from onceward.testing import Lab, PostgresLab
from onceward.testing.sources import SourceContract
from tests.broker_labs import KafkaLab
from tests.services import kafka

pytestmark = pytest.mark.xdist_group("kafka")


class TestAiokafka(SourceContract):
    @pytest.fixture
    def broker(self, kafka_server: kafka.Broker) -> KafkaLab:
        return KafkaLab(kafka_server, "kafka")

    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab


class TestConfluent(SourceContract):
    @pytest.fixture
    def broker(self, kafka_server: kafka.Broker) -> KafkaLab:
        return KafkaLab(kafka_server, "confluent")

    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab
