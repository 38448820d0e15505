"""Settings: definitions, sources, and the engine's configuration made from them.

In reading order:

setting_types  The types of settings in addition to pydantic's.
settings       Every setting, defined once: type, range, default, description, and the rules between settings.
sources        The environment, the settings file and flags, and the messages for refused settings.
engine         The engine's configuration and labels, made from settings and a model.
"""
