"""A circuit breaker: a backend that fails again and again is left alone for a while, then tried with one request."""

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


class CircuitBreaker:
    """Opens after `failures` in a row, for `cooldown_s` that doubles each time a trial fails."""

    def __init__(self, *, failures: int = 3, cooldown_s: float = 2.0, max_cooldown_s: float = 30.0) -> None:
        self._failures = failures
        self._first_cooldown_s = self._cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._in_a_row = 0
        self._open_until_s = 0.0
        self._trial_until_s = 0.0
        self.state = CLOSED

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent; while half open, one at a time."""
        if self.state == CLOSED:
            return True
        if self.state == OPEN:
            return now_s >= self._open_until_s
        return now_s >= self._trial_until_s

    def on_send(self, now_s: float) -> None:
        """A request is sent: after the cool-down it is the trial, for as long as a cool-down may be."""
        if self.state != CLOSED:
            self.state = HALF_OPEN
            self._trial_until_s = now_s + self._max_cooldown_s

    def on_success(self) -> None:
        """The backend has answered."""
        self.state = CLOSED
        self._in_a_row = 0
        self._cooldown_s = self._first_cooldown_s

    def on_failure(self, now_s: float) -> None:
        """The backend has failed."""
        self._in_a_row += 1
        if self.state == HALF_OPEN:
            self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
        elif self._in_a_row < self._failures:
            return
        self.state = OPEN
        self._open_until_s = now_s + self._cooldown_s

    def on_given_up(self, now_s: float) -> None:
        """The client went away before the backend could show anything: the next request is the trial."""
        if self.state == HALF_OPEN:
            self._trial_until_s = now_s
