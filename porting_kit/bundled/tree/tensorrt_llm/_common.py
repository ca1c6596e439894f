"""The network that is being defined: every operation of a forward pass is added to the current one."""

_network = None


def set_network(network):
    """Make a network the current one; None when the definition is done."""
    global _network
    _network = network


def default_net():
    """The current network; its `plugin_config` says how the model is to be built (packed input, paged KV cache ...).

    Raises:
        RuntimeError: no network is being defined.
    """
    if _network is None:
        raise RuntimeError("no network is being defined; these models run inside porting_kit.emulator only")
    return _network
