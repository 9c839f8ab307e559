"""The text of a roster, which goes to every member."""

from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.membership.roster_store import Roster
from tests.properties import examples


@examples(100)
@given(st.none() | st.lists(st.integers(0, 20), unique=True).map(tuple), st.integers(0, 9))
def test_a_roster_is_read_as_it_was_written(members, former):
    roster = Roster(3, members, 2.5, former)
    assert Roster.from_json(roster.to_json()) == roster


def test_a_roster_grows_with_the_replacements_and_not_with_the_ranks():
    members = list(range(9600))
    assert len(Roster(0, tuple(members)).to_json()) < 200
    for replaced in range(10):
        members[500 * replaced + 7] = 9600 + replaced
    assert len(Roster(1, tuple(members)).to_json()) < 1000
