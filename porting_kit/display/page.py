def render_report(run, outcomes, combined):
    return str(combined) + str(outcomes)
