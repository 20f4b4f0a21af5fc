"""The Gymnasium environment: `gymnasium.make("vidur_ppo/Routing-v0", scenario="mixed_long")`.

Importing this package registers it and costs little; Vidur is imported when an environment is made.
"""

from gymnasium.envs.registration import register, registry

from vidur_ppo_plugin import _autoload

ENV_ID = "vidur_ppo/Routing-v0"
#: Steps through a record of `vidur-ppo serve` instead of a simulation.
RECORDED_ENV_ID = "vidur_ppo/Recorded-v0"

# Vidur has to know our types when it is imported, which modules of this package do.
_autoload.install()

if ENV_ID not in registry:
    register(
        id=ENV_ID,
        entry_point="vidur_ppo_plugin.envs.routing_env:RoutingEnv",
        vector_entry_point="vidur_ppo_plugin.envs.vector_env:VectorRoutingEnv",
    )

if RECORDED_ENV_ID not in registry:
    register(id=RECORDED_ENV_ID, entry_point="vidur_ppo_plugin.envs.recorded_env:RecordedEnv")
