"""Settings for all tests of figures."""

import hypothesis

# What an example takes says nothing: the first one may compile a kernel, and machines are shared.
hypothesis.settings.register_profile("treadle", deadline=None)
if hypothesis.settings.get_current_profile_name() == "default":
    hypothesis.settings.load_profile("treadle")
