"""Settings: definitions, sources, and the engine's configuration made from them.

In reading order:

setting_types  The types of settings in addition to pydantic's.
rules          The rules between settings.
settings       Every setting, defined once: type, range, default, description.
several        The settings of several models: their tables, and a folder of models.
sources        The environment, the settings file and flags, and the messages for refused settings.
engine         The engine's configuration and labels, made from settings and a model.
"""
