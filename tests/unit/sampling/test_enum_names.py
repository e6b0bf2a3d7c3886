"""Enums of a request read as their names wherever they are printed, and stay numbers on the wire."""

from outrider.sampling.params import AcceptanceRule, Finish, Origin


def test_enums_print_their_names_and_count_as_numbers() -> None:
    for kind in (AcceptanceRule, Origin, Finish):
        for member in kind:
            assert f"{member}" == str(member) == f"{member!s}" == member.name.lower()
            assert f"{member:>20}" == member.name.lower().rjust(20)
            assert int(member) == member.value
            assert kind(member.value) is member
