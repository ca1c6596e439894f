"""Fixtures: the tiny ports of tests/alignment."""

import pytest

from tests.alignment.tiny_ports import make_port

_PORTS = {}


@pytest.fixture(scope="session")
def port_of(tmp_path_factory):
    """A healthy port by family name and dtype."""

    def get(family, dtype="float32", **options):
        key = (family, dtype, tuple(sorted(options.items())))
        if key not in _PORTS:
            _PORTS[key] = make_port(tmp_path_factory.mktemp(family), family, dtype=dtype, **options)
        return _PORTS[key]

    return get
