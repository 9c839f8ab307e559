"""Let hydra search the user's configuration directory before the shipped one.

Importing this module registers the plugin. The override `hydra.searchpath` does not suffice: it
adds directories behind the shipped one, whose files would win.
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
