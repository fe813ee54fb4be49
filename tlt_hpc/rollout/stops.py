class StopStrings:
    def __init__(self, strings, decode):
        self.s, self.d = strings, decode

    def first_end(self, tokens, num_checked):
        for i in range(num_checked, len(tokens)):
            t = self.d(tokens[: i + 1])
            if any(x in t for x in self.s):
                return i
        return None
