"""What a site can have without a federation: scikit-learn's usual models, trained on its own rows alone.

records      a rival, and the rivals of all sites
effort       how many trees fit into the time, and how long it takes
estimators   the models: from training rows to answers, with cross-validated answers beside them
site         the rivals of one site
process      the same in processes of their own
choice       the best rival, without test rows
file         rivals.json
"""
