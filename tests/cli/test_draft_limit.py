"""The draft limit is written under every name the target release may read it by."""

import pytest

from porting_kit.steps.context import open_port_run
from porting_kit.steps.convert import convert_port
from tests.cli.conftest import PortFolder


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("0.8.0", {"max_draft_len", "max_medusa_token_len"}),
        ("0.11.0.dev2024062500", {"max_draft_len"}),
    ],
)
def test_draft_limit_names_follow_the_release(port: PortFolder, tmp_path, release, names):
    overrides = {"kernel": f"release:{release}", "dtype": "float16"}
    result = convert_port(open_port_run(port.file, run_folder=tmp_path / "run", overrides=overrides))
    config = result.conversion.config
    assert {name for name in ("max_draft_len", "max_medusa_token_len") if name in config} == names
    assert {config[name] for name in names} == {63}
