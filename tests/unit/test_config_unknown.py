"""Unknown keys of a configuration name the one that was meant; case U02."""

import pytest

from mpitrain.config.unknown import ALIASES, EXPLAINED, known_keys
from tests.reference.configs import message_of


@pytest.mark.parametrize(
    ("text", "unknown", "meant"),
    [
        ("[optim]\nlearing_rate = 1", "optim.learing_rate", "optim.lr"),
        ("lr = 1", "'lr'", "optim.lr"),
        ("[train]\nlr = 1", "train.lr", "optim.lr"),
        ("[train]\nnum-epochs = 1", "train.num-epochs", "train.steps"),
        ("num-epochs = 1", "'num-epochs'", "train.steps"),
        ("[train]\nbatch-size = 1", "train.batch-size", "train.batch_size"),
        ("batch-size = 1", "'batch-size'", "train.batch_size"),
        ("[training]\nsteps = 1", "'training'", "train"),
        ("[optimizer]\nlr = 1", "'optimizer'", "optim"),
        ("[model]\nd_modle = 1", "model.d_modle", "model.d_model"),
        ("[model]\nlearning_rate = 1", "model.learning_rate", "optim.lr"),
        ("[exchange]\ncompression = 'int8'", "exchange.compression", "exchange.codec"),
        ("[Train]\nsteps = 1", "'Train'", "train"),
    ],
)
def test_unknown_keys_name_the_one_that_was_meant(text, unknown, meant):
    message = message_of(text=text)
    assert message.startswith("run.toml: unknown")
    assert unknown in message
    assert message.endswith(f"; did you mean {meant}?")


def test_unknown_keys_without_a_likeness():
    assert (
        message_of(text="[train]\nxyzzy = 1") == "run.toml: unknown key train.xyzzy; mpitrain reference lists the keys"
    )
    assert message_of("train.xyzzy=1") == "--set: unknown key train.xyzzy; mpitrain reference lists the keys"
    assert message_of("plugh.xyzzy=1").startswith("--set: unknown section or key 'plugh'")


def test_every_key_outside_its_section_is_sent_home():
    known = known_keys()
    for section, keys in known.items():
        for key in keys:
            homes = [home for home, names in known.items() if key in names]
            if len(homes) == 1 and key not in known:
                assert message_of(text=f"{key} = 1").endswith(f"; did you mean {section}.{key}?")


def test_every_alias_points_to_a_key():
    known = {f"{section}.{key}" for section, keys in known_keys().items() for key in keys}
    assert set(ALIASES.values()) <= known
    # Two sections have this key, and one of them is what other programs mean by it.
    assert {alias for alias in ALIASES if any(key.endswith(f".{alias}") for key in known)} == {"warmup_steps"}


@pytest.mark.parametrize("key", EXPLAINED)
def test_keys_that_have_no_counterpart_are_explained(key):
    for text in (f"[checkpoint]\n{key} = 1", f"{key} = 1", f"[checkpoint]\n{key.replace('_', '-').upper()} = 1"):
        message = message_of(text=text)
        assert message.endswith(f": {EXPLAINED[key]}; leave it out")
        assert "did you mean" not in message


def test_parallel_hdf5_is_not_needed():
    """H07."""
    message = message_of("checkpoint.driver=mpio")
    assert message.startswith(
        "--set: unknown key checkpoint.driver: every rank writes its own file, so no parallel HDF5"
    )


def test_explained_keys_are_no_keys():
    known = {key for keys in known_keys().values() for key in keys} | set(known_keys()) | set(ALIASES)
    assert not known & set(EXPLAINED)
