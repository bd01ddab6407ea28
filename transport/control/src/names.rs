//! Which rank a certificate may speak for.

/// Whether a certificate with the subject alternative names `names` may speak for the rank `rank_name` (design 1.9:
/// a SAN is the rank's name or a prefix of it).
///
/// A name allows a rank in one of three ways:
/// - it equals the rank's name;
/// - it is a prefix that ends at a boundary: the prefix itself ends with `-` or `.`, or the rank's name goes on with
///   one (`engine0` and `engine0-` allow `engine0-tp3`, and neither allows `engine01`);
/// - it ends with `*`, and what stands before the `*` is a prefix of any kind (`engine*` allows `engine01`, a lone `*`
///   allows every rank, as the development certificate does).
///
/// Comparison is by bytes: rank names are case sensitive. Empty names allow nothing.
#[must_use]
pub fn san_allows(names: &[String], rank_name: &str) -> bool {
    !rank_name.is_empty() && names.iter().any(|name| name_allows(name, rank_name))
}

fn name_allows(name: &str, rank_name: &str) -> bool {
    if name.is_empty() {
        return false;
    }
    if let Some(prefix) = name.strip_suffix('*') {
        return rank_name.starts_with(prefix);
    }
    let Some(rest) = rank_name.strip_prefix(name) else {
        return false;
    };
    rest.is_empty() || name.ends_with(['-', '.']) || rest.starts_with(['-', '.'])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(name: &str, rank: &str) -> bool {
        san_allows(&[name.to_owned()], rank)
    }

    #[test]
    fn a_name_allows_itself_and_what_follows_a_boundary() {
        assert!(allows("engine0", "engine0"));
        assert!(allows("engine0", "engine0-tp3"));
        assert!(allows("engine0", "engine0.tp3"));
        assert!(allows("engine0-", "engine0-tp3"));
        assert!(allows("pod.", "pod.engine"));
        assert!(!allows("engine0", "engine01"));
        assert!(!allows("engine0", "engine0_1"));
        assert!(!allows("engine0-tp3", "engine0"));
        assert!(!allows("Engine0", "engine0"));
    }

    #[test]
    fn a_star_ends_any_prefix() {
        assert!(allows("engine*", "engine01"));
        assert!(allows("*", "anything"));
        assert!(!allows("engine*", "motor"));
        assert!(!allows("*.example", "a.example"), "a star is a wildcard only at the end");
    }

    #[test]
    fn nothing_allows_nothing() {
        assert!(!san_allows(&[], "engine0"));
        assert!(!allows("", "engine0"));
        assert!(!allows("*", ""));
        assert!(san_allows(&["a".into(), "b".into()], "b"));
    }
}
