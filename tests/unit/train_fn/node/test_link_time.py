"""Timing a link: blocks that arrive are timed, and a peer that takes nothing in is given up."""

from __future__ import annotations

import socket

from train_fn.node.network import pass_time, take_in


def test_a_block_that_arrives_is_timed_and_the_listener_goes_with_its_sender() -> None:
    address = take_in("127.0.0.1", 10.0)
    seconds = pass_time(address, 10.0)
    assert seconds is not None and 0 < seconds < 10
    assert pass_time(address, 1.0) is None, "one sender, once"


def test_a_peer_that_takes_nothing_in_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert pass_time(("127.0.0.1", silent.getsockname()[1]), 0.2) is None
