"""Is the weight deserved? What each client is worth, by means that know nothing of the scores, beside the scores.

games      Shapley values of any set function, exactly or from sampled orders
ranks      rank correlations, and how sure one can be of them
replay     a run again, with the door to its server open: who is heard, and what each round's server would be without
audit      one run: its references, its scores, what they have in common
tables     the same as text, Markdown and JSON
planted    a federation with four clients that are known to be odd
study      what the scores say of them, and who pays for it
commands   `copfl audit`
"""
