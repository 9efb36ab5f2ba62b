"""The page of the commands is made from their help."""

from dev.docs.cli import PAGE, SETTINGS, commands, filled


def test_page_of_commands_is_that_of_their_help():
    page = PAGE.read_text()
    assert filled(page) == page, "Run: python -m dev.docs.cli"


def test_each_command_has_a_section_and_each_of_its_options_a_row():
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## muster ")[1:])
    assert sections.keys() == {name for name, _ in commands()}
    for name, command in commands():
        if name not in SETTINGS:
            shown = sections[name] + PAGE.read_text().partition("## muster ")[0]
            for option in command.params:
                assert option.param_type_name == "argument" or f"`{option.opts[0]}" in shown
