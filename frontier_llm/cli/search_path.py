"""Let hydra search the directory of `--conf-dir` before `conf/`.

Importing this module registers the plugin. Hydra's own setting `hydra.searchpath` does not suffice,
because hydra searches such directories after `conf/`, and a file of the user could not replace a
file of the same name in `conf/`.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from frontier_llm.cli.package_files import CONF_DIR_OPTION, conf_folders


class ConfDirSearchPath(SearchPathPlugin):
    """Prepend the directory of `--conf-dir` to hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path; hydra calls this whenever it composes."""
        for folder in conf_folders()[:-1]:
            search_path.prepend(provider=CONF_DIR_OPTION, path=f"file://{folder}")


Plugins.instance().register(ConfDirSearchPath)
