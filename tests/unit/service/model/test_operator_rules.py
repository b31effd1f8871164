"""Rights from groups."""

from __future__ import annotations

import pytest

from service.model.operator_rules import Grant, GrantRule


def test_the_highest_role_comes_first_and_included_rights_are_left_out() -> None:
    rule = GrantRule.of(
        [
            "a=viewer:speech",
            "a=submitter:vision",
            "b=viewer:vision",
            "cn=x,ou=ops=admin",
            "all=viewer:*",
        ]
    )
    assert rule.grants(["a", "b", "c"]) == (
        Grant("submitter", "vision"),
        Grant("viewer", "speech"),
    )
    assert rule.grants(["a", "all"]) == (Grant("submitter", "vision"), Grant("viewer", None))
    assert rule.grants(["a", "cn=x,ou=ops"]) == (Grant("admin", None),)
    assert rule.grants([]) == ()


def test_everyone_has_the_rights_of_the_star() -> None:
    assert GrantRule.of(["*=viewer:vision"]).grants([]) == (Grant("viewer", "vision"),)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ("admins", "names no group"),
        ("=admin", "names no group"),
        ("a=root", "is not a role"),
        ("a=admin:vision", "every project"),
        ("a=submitter", "one project"),
        ("a=submitter:*", "one project"),
        ("a=viewer", "belongs to a project"),
        ("a=viewer:Vision", "is not a role"),
    ],
)
def test_a_wrong_item_is_refused_with_the_form(item: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as told:
        GrantRule.of([item])
    assert "GROUP=" in str(told.value)
