"""How the next token is drawn, without torch: the command line refuses bad numbers before it imports that."""


def check_sampling(new: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """`new` tokens can be drawn with these settings of `generate`.

    Raises: ValueError that names the setting, what it must be and what it is.

        check_sampling(100, temperature=0.8, top_k=None, top_p=0.95)
    """
    if new < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {new}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
