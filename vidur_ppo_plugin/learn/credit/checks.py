"""How rewards refuse what they are given."""


def require(is_right: bool, name: str, value: object, right: str) -> None:
    """ValueError naming the parameter, its value and what would be right."""
    if not is_right:
        raise ValueError(f"{name} must be {right}, got {value!r}")
