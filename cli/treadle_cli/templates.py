"""Fill in the Jinja2 templates that lie beside a module: `*.html.j2` with values escaped, `*.md.j2`
as they are.

A template holds words, the caller passes figures. A name that the caller did not pass raises
jinja2.UndefinedError.
"""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def render(package: str, template: str, **values: object) -> str:
    """Return the text of `template`, a file of `package` ("treadle_cli.simulate"), with `values` as
    its names."""
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = format  # {{ share | number(".1%") }}
    return environment
